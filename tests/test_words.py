"""Docstrings are sentences that say what a thing is or does."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("tir_kernels", "relax_passes", "stof_tvm", "tests", "benchmarks", "docs")
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
