"""The README's first screen: what it is, an example that runs, and a table of what was measured."""

import re
from pathlib import Path

from benchmarks.peers.cases import attention_case
from benchmarks.peers.results import Results, best, read_rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert example.count("\n") <= 16 and "assert" in example.splitlines()[-1]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert "sparse kernels" in capsys.readouterr().out


def test_the_first_table_is_of_the_committed_rows():
    table = README[: README.index("## Install")]
    results = Results(read_rows([ROOT / "benchmarks" / "results" / "nvidia-h200" / "attention.json"]))
    rows = re.findall(r"^\| ([a-zA-Z ]+) \| ([\d.]+) % \| (\d+) \| (\d+) \| (\d*) ?\| (\d+) \|$", table, re.M)
    assert len(rows) == 6 and "NVIDIA H200, 2026-11-21" in table
    for name, kept, *shown in rows:
        mask = name.lower().replace(" ", "_").removesuffix("s")
        case = attention_case(8, 12, 4096, 64, mask)
        peers = results.peers(case, bounds=False)
        flex = best({system: us for system, us in peers.items() if system.startswith("flex")})[1]
        measured = [results.us(case, "stof"), flex, peers.get("fa4"), peers["sdpa-mask"]]
        assert shown == ["" if us is None else f"{us:.0f}" for us in measured]
        assert abs(100 * results.densities[case] - float(kept)) < 0.5
