"""The README's example runs, and the links of all pages lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("tir_kernels/*.md")]


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert example.count("\n") <= 16 and "assert" in example.splitlines()[-1]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert "sparse kernels" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_named_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for goal in re.findall(r"^make ([\w-]+)", README + (ROOT / "CONTRIBUTING.md").read_text(), re.M):
        assert re.search(rf"^{goal}:", makefile, re.M)
