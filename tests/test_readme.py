"""The README's example runs and its links lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert example.count("\n") <= 16 and "assert" in example.splitlines()[-1]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert "sparse kernels" in capsys.readouterr().out


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert targets and not [target for target in targets if not (ROOT / target).exists()]


def test_named_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for goal in re.findall(r"^make (\w+)", README, re.M):
        assert re.search(rf"^{goal}:", makefile, re.M)
