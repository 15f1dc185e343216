"""Docstrings are sentences that say what a thing is or does, and lines of pages are as short as those of code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("tir_kernels", "relax_passes", "stof_tvm", "tests", "benchmarks", "docs")
PAGES = sorted({*ROOT.glob("docs/**/*.md")} - {ROOT / "docs" / f"{name}.md" for name in ("models", "operators")})
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source: str) -> list[str]:
    """Docstrings of a module that begin with "Of", and so leave out what they speak of."""
    found = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    return [text for text in found if text.split(maxsplit=1)[:1] == ["Of"]]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_with_of(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    found = {str(file.relative_to(ROOT)): texts for file in files if (texts := fragments(file.read_text()))}
    assert files and not found


def test_a_fragment_is_found():
    assert fragments('def threads(): """Of a CTA."""') == ["Of a CTA."]
    assert not fragments('"""Offsets."""\ndef threads(): """Threads of a CTA."""')


def long_lines(text: str) -> list[str]:
    """Lines of more than 120 characters that Markdown lets wrap: neither of a table, nor a picture, nor options."""
    return [
        line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith(("|", "![", "options:"))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_pages_are_wrapped(page):
    assert not long_lines(page.read_text())


def test_a_long_line_is_found():
    assert long_lines(f"short\n{'word ' * 30}\n| {'cell ' * 30}|") == ["word " * 30]
