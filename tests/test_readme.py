"""The README says for whom it is, its example runs, and its numbers are those of committed rows."""

import json
import re
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.cases import attention_case
from benchmarks.peers.results import Results, best, read_rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SUMMARY = (ROOT / "benchmarks" / "summary.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert example.count("\n") <= 16 and "assert" in example.splitlines()[-1]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert "sparse kernels" in capsys.readouterr().out


def test_who_should_use_it_stands_before_the_example_and_installing_before_tables():
    starts = [README.index(text) for text in ("**Use it**", "**Do not use it**", "```python", "## Install", "\n|")]
    assert starts == sorted(starts)
    assert README[: starts[2]].count("\n") < 25


def test_lines_are_not_longer_than_code_is():
    for text in (README, SUMMARY):
        assert not [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]


def headlines() -> list[list[str]]:
    table = README[README.index("## What is measured") : README.index("## Masks and models")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*\|$", table, re.M)[2:]]


def test_the_headlines_are_of_the_committed_rows():
    """Ours, the best peer, their ratio and the date of each row; losses are among them."""
    attention = Results(read_rows([RESULTS / "nvidia-h200" / "attention.json"]))
    assert len(headlines()) == 14
    for name, *shown in headlines():
        if name.startswith("BERT"):
            measured = models("bert", 16, 2048)
        elif name.endswith("as it is"):
            model, batch, length = re.match(r"(\S+), (\d+) × (\d+) tokens", name).groups()
            measured = models(model, int(batch), int(length), "zoo.json", "length")
        elif "to the first one" in name:
            measured = generation("first", name.partition(",")[0], 8193)
        elif "the next token of 16 texts" in name:
            measured = generation("decode", name.partition(",")[0], 32768, "nvidia-h200", 16)
        elif name.startswith("a mask found in each call"):
            measured = found_masks("vertical_slash", 131072)
        elif name.startswith("sliding tiles of a video"):
            measured = video("HunyuanVideo", 115200)
        elif name.endswith("on two GPUs"):
            measured = two_gpus("8x2048", 32)
        elif name.endswith("float32"):
            measured = cpu_attention("bigbird")
        else:
            mask, sizes, *dtype = name.split(", ")
            batch, heads, *shape = sizes.split(" × ")
            heads, _, kv_heads = heads.partition("/")
            mask = mask.lower().replace(" ", "_").removesuffix("s")
            case = attention_case(int(batch), int(heads), *map(int, shape), mask)
            case = replace(case, kv_heads=int(kv_heads or heads), dtype=dtype[0] if dtype else "float16")
            measured = attention.us(case, "stof"), best(attention.peers(case, bounds=False))[1]
        ours, peer = measured
        unit = 1000 if "ms" in shown[0] else 1
        for cell, us in zip(shown, measured, strict=False):
            decimals = len(re.match(r"[\d,]+\.?(\d*)", cell)[1])
            assert number(cell) == round(us / unit, decimals)
        assert abs(number(shown[2]) - peer / ours) < 0.05
    assert sum(number(ratio) < 1 for *_, ratio, _ in headlines()) >= 2


def number(cell: str) -> float:
    return float(re.match(r"[\d.,]*\d", cell)[0].replace(",", ""))


def models(model: str, batch: int, length: int, file="models.json", counted="q_len") -> tuple[float, float]:
    """Microseconds of ours and of the fastest peer."""
    rows = json.loads((RESULTS / "nvidia-h200" / file).read_text())
    cases = [row for row in rows if [row["case"][k] for k in ("model", "batch", counted)] == [model, batch, length]]
    us = {row["system"]: row["median_us"] for row in sorted(cases, key=lambda row: row["date"]) if "failed" not in row}
    return us["stof"], min(time for system, time in us.items() if not system.startswith("stof"))


def generation(kind: str, model: str, cache: int, gpu="nvidia-h100-80gb-hbm3", batch=1) -> tuple[float, float]:
    """Microseconds of ours and of the fastest peer; of tokens after the first, without a window."""
    rows = json.loads((RESULTS / gpu / "generate.json").read_text())
    keys = ("kind", "model", "cache", "batch")
    cases = [row for row in rows if [row["case"][k] for k in keys] == [kind, model, cache, batch]]
    cases = [row for row in cases if kind == "first" or not row["case"]["window"]]
    us = {row["system"]: row["median_us"] for row in cases}
    return us["stof"], min(time for system, time in us.items() if not system.startswith("stof"))


def found_masks(rule: str, length: int) -> tuple[float, float]:
    """Microseconds of ours and of the fastest dense peer on an H100, and the rule keeps what the README says."""
    rows = json.loads((RESULTS / "nvidia-h100-80gb-hbm3" / "runtime_masks.json").read_text())
    found = {row["system"]: row for row in rows if [row["case"][k] for k in ("rule", "length")] == [rule, length]}
    assert f"({found['stof']['recall']:.3f} of the softmax)" in README
    return found["stof"]["median_us"], min(x["median_us"] for name, x in found.items() if not name.startswith("stof"))


def video(name: str, length: int) -> tuple[float, float]:
    """Microseconds of ours and of the fastest peer on an H100."""
    rows = json.loads((RESULTS / "nvidia-h100-80gb-hbm3" / "video.json").read_text())
    found = [row for row in rows if [row["case"][k] for k in ("name", "length")] == [name, length]]
    us = {row["system"]: row["median_us"] for row in found if "failed" not in row}
    return us["stof"], min(time for system, time in us.items() if system != "stof")


def two_gpus(name: str, layers: int) -> tuple[float, float]:
    """Microseconds of ours on two H200 and on one."""
    rows = json.loads((RESULTS / "nvidia-h200" / "parallel.json").read_text())
    found = [row for row in rows if [row["case"][k] for k in ("name", "layers")] == [name, layers]]
    us = {row["system"]: row["median_us"] for row in found if "failed" not in row}
    return us["stof"], us["stof-1"]


def cpu_attention(mask: str) -> tuple[float, float]:
    """Microseconds of ours and of PyTorch with the mask."""
    rows = json.loads((RESULTS / "amd-epyc" / "attention.json").read_text())
    us = {row["system"]: row["median_us"] for row in rows if row["case"]["mask"] == mask}
    return us["stof"], us["sdpa-mask"]


def test_the_table_of_masks_is_of_the_committed_rows():
    table = SUMMARY[: SUMMARY.index("Further points")]
    results = Results(read_rows([RESULTS / "nvidia-h200" / "attention.json"]))
    rows = re.findall(r"^\| ([a-zA-Z ]+) \| ([\d.]+) % \| (\d+) \| (\d+) \| (\d*) ?\| (\d+) \|$", table, re.M)
    assert len(rows) == 6 and "NVIDIA H200, 2026-11-21 to 29" in table
    for name, kept, *shown in rows:
        mask = name.lower().replace(" ", "_").removesuffix("s")
        case = attention_case(8, 12, 4096, 64, mask)
        peers = results.peers(case, bounds=False)
        flex = best({system: us for system, us in peers.items() if system.startswith("flex")})[1]
        measured = [results.us(case, "stof"), flex, peers.get("fa4"), peers["sdpa-mask"]]
        assert shown == ["" if us is None else f"{us:.0f}" for us in measured]
        assert abs(100 * results.densities[case] - float(kept)) < 0.5
