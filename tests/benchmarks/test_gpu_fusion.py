"""The fusion benchmark: its cases, a dry run on the CPU, its requirements, and the merged files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_fusion
from benchmarks.fusion import stof, torch_systems
from benchmarks.fusion.cases import FusionCase, fusion_cases, tiny
from benchmarks.fusion.measure import Inputs
from benchmarks.fusion.results import FusionResults, floor_us, matrix_us, memory_us
from benchmarks.fusion.targets import lines
from benchmarks.fusion.torch_systems import PARTIAL, sequence
from tir_kernels.fusion.reference import fusion_reference
from tir_kernels.target import parse_target

SCRIPT = Path(gpu_fusion.__file__)
GELU, NORM, NORMED, MLP = (
    FusionCase("gemm-gelu", 512, 3072, 768),
    FusionCase("residual-norm", 4096, 768, 0),
    FusionCase("gemm-norm", 512, 768, 3072),
    FusionCase("mlp", 512, 768, 768, inner=64),
)


@pytest.fixture
def fusion_row():
    """A function that makes a result row as a measuring run writes it."""

    def make(case, system, us=None, date="2026-11-21", **fields):
        row = {"bench": "fusion", "gpu": "NVIDIA H200", "driver": "580", "date": date, "commit": "abc", "run": "one"}
        row |= {"case": case.to_json(), "system": system}
        if us is not None:
            row |= {"variant": "some", "median_us": us, "wall_us": us + 10, "samples_us": [us], "error": 1e-4}
            row |= {"half_error": 2e-4, "predicted_us": us}
        return row | fields

    return make


def verdicts(rows) -> dict[str, tuple[str, float]]:
    return {
        f"{line.what} / {line.against}": (line.verdict, line.mean) for line in lines(FusionResults(rows)) if line.ratios
    }


def test_cases_are_all_that_is_asked_for():
    cases = fusion_cases()
    assert len(set(cases)) == len(cases) == 4 * (5 + 5) + 3 * (1 + 5) + 4 * 5 + 4 * 5
    assert {case.m for case in cases if case.template == "gemm-norm"} == {128, 512, 2048, 4096, 32768}
    for case in cases:
        assert FusionCase.from_row({"case": case.to_json()}) == case
        arguments = case.arguments(case.input_shapes)
        assert [(shape, case.dtype) for shape in arguments] == case.problem.inputs


@pytest.mark.parametrize("case", [tiny(GELU), tiny(NORM), tiny(NORMED), tiny(MLP)], ids=lambda case: case.template)
def test_torch_computes_what_the_problem_says(case):
    inputs = Inputs(case, "cpu", seed=1).sets[0]
    arguments = case.arguments([x.double() for x in inputs])
    (expected,) = fusion_reference(case.problem, *arguments)
    torch.testing.assert_close(sequence(case, *(x.double() for x in inputs)), torch.from_numpy(expected))
    if "stof-unfused" in stof.systems_for(case, 1):
        first, second = case.unfused
        count = len(first.inputs)
        (x,) = fusion_reference(first, *arguments[:count])
        (unfused,) = fusion_reference(second, x, *arguments[count:])
        torch.testing.assert_close(torch.from_numpy(unfused), torch.from_numpy(expected))
    for system in torch_systems.systems_for(case):
        if "compile" not in system and system not in PARTIAL:
            out = torch_systems.prepare(system, case)(*inputs)
            torch.testing.assert_close(out.double(), torch.from_numpy(expected), atol=2e-2, rtol=1e-2)


def test_floor_is_the_larger_of_memory_and_products():
    assert memory_us(NORM) == pytest.approx((3 * 4096 * 768 + 3 * 768) * 2 / 4.3e6)
    assert matrix_us(GELU) == pytest.approx(2 * 512 * 3072 * 768 / 790e6)
    assert floor_us(NORM) == memory_us(NORM) and matrix_us(NORM) == 0
    assert memory_us(MLP) == pytest.approx((2 * 512 * 768 + 2 * 768 * 64 + 768 + 64) * 2 / 4.3e6)
    assert matrix_us(MLP) == pytest.approx(2 * (2 * 512 * 768 * 64) / 790e6)


def test_kernels_are_ordered_by_prediction(monkeypatch):
    class Template:
        NAME = "some"

        def __init__(self, times):
            self.times = times

        def unsupported(self, problem, target):
            return None if self.times else "never"

        def configs(self, problem, target):
            return sorted(self.times)

        def predict_us(self, problem, config, target):
            return self.times[config]

    templates = [Template({"a": 3.0, "b": 1.0}), Template({}), Template({"c": 2.0})]
    monkeypatch.setattr(stof, "templates_for", lambda target: templates)
    found = stof.candidates(NORM.problem, None, 2)
    assert [(kernel.config, kernel.predicted_us) for kernel in found] == [("b", 1.0), ("c", 2.0)]
    monkeypatch.setattr(stof, "templates_for", lambda target: templates[1:2])
    with pytest.raises(stof.UnsupportedError, match="some: never"):
        stof.candidates(NORM.problem, None, 2)


def test_requirements_are_computed_from_rows(fusion_row):
    rows = [fusion_row(GELU, "stof", 8.0), fusion_row(GELU, "cublas-compile", 10.0), fusion_row(GELU, "cublas", 6.0)]
    rows += [fusion_row(NORM, "stof", 5.0), fusion_row(NORM, "compile", 4.0), fusion_row(NORM, "torch-add", 4.5)]
    found = verdicts(rows)
    assert found["GEMM + bias + GELU, BERT, M ≤ 2048 / cuBLAS + one compiled kernel"] == ("incomplete", 1.25)
    assert found["residual + bias + norm / torch.compile"] == ("miss", 0.8)
    assert found["residual + bias + norm, M ≥ 4096 / the memory floor"][0] == "miss"


def test_products_without_wgmma_are_a_system_of_their_own_with_a_requirement(fusion_row):
    assert stof.systems_for(GELU, 1) == ("stof", "stof-mma")
    assert stof.systems_for(FusionCase("gemm-gelu", 4096, 3072, 768), 1) == ("stof",)
    target = parse_target("cuda -arch=sm_90a")
    kernels = [kernel for (kernel,) in stof.variants("stof-mma", GELU, target, 1)]
    assert len(kernels) == 8 and not any(kernel.config.warpgroup for kernel in kernels)
    assert stof.variants("stof", GELU, target, 1)[0][0].config.warpgroup
    rows = [fusion_row(GELU, "stof-mma", 8.0), fusion_row(GELU, "cublas-compile", 10.0)]
    what = "GEMM + bias + GELU with sm_80 instructions, BERT, M ≤ 2048 / cuBLAS + one compiled kernel"
    assert verdicts(rows) == {what: ("incomplete", 1.25)}


def test_wrong_result_is_a_miss_and_a_bound_is_no_peer(fusion_row):
    rows = [
        fusion_row(NORM, "stof", 1.0, error=1.0),
        fusion_row(NORM, "compile", 4.0),
        fusion_row(NORM, "torch-add", 1),
    ]
    assert verdicts(rows)["residual + bias + norm / torch.compile"] == ("miss", 0.0)
    assert FusionResults(rows).peers(NORM) == {"compile": 4.0}


@pytest.mark.parametrize(
    "may_propose, predicted, proposed", [(True, 9.0, True), (True, 11.0, False), (False, 9.0, False)]
)
def test_one_kernel_is_compared_where_it_is_predicted_to_pay(may_propose, predicted, proposed, fusion_row, monkeypatch):
    monkeypatch.setattr("tir_kernels.fusion.gemm.gemm_norm.IS_PROPOSED", may_propose)
    rows = [fusion_row(NORMED, "stof", 12.0, predicted_us=predicted)]
    rows += [fusion_row(NORMED, "stof-unfused", 10.0), fusion_row(NORMED, "compile", 20.0)]
    found = verdicts(rows)
    pays = "GEMM + bias + residual + norm, where predicted to pay / the two kernels it replaces"
    assert (found[pays][0] == "miss") if proposed else pays not in found
    best = next(mean for what, (_, mean) in found.items() if what.endswith("the best of PyTorch's"))
    assert best == pytest.approx(20 / 12 if proposed else 20 / 10)


def test_merge_writes_rows_and_page(tmp_path, fusion_row):
    files = {
        "a.json": [fusion_row(GELU, "stof", 9.0), fusion_row(GELU, "compile", 8.0), fusion_row(GELU, "eager", 18.0)],
        "b.json": [fusion_row(GELU, "stof", 10.0), fusion_row(NORM, "stof", 6.0), fusion_row(NORM, "compile")],
    }
    files["b.json"][2]["failed"] = "RuntimeError: no"
    for name, rows in files.items():
        (tmp_path / name).write_text(json.dumps(rows))
    assert gpu_fusion.merge([tmp_path / name for name in files], tmp_path / "results") == 0
    merged = json.loads((tmp_path / "results" / "nvidia-h200" / "fusion.json").read_text())
    assert [row["median_us"] for row in merged if row["system"] == "stof"] == [10.0, 6.0]
    page = (tmp_path / "results" / "nvidia-h200" / "fusion.md").read_text()
    assert "0.80× gemm-gelu 512x3072x768: 10 against 8 of compile" in page
    assert "18 (1.80)" in page and "compile, 1 cases (residual-norm 4096x768): RuntimeError: no" in page


@pytest.mark.slow
def test_dry_run_goes_the_whole_way(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--workers", "1", "--out", str(out)]
    command += ["--only", "residual-norm 4096x768", "--systems", "stof,compile,eager,torch-add"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["system"]: row for row in json.loads(out.read_text())}
    assert list(rows) == ["stof", "compile", "eager", "torch-add"]
    assert "only a GPU can run it" in rows["stof"]["failed"]
    for system in ("compile", "eager"):
        assert rows[system]["error"] <= 2 * rows[system]["half_error"] and rows[system]["wall_us"] > 0
    assert len({row["run"] for row in rows.values()}) == 1 and rows["eager"]["bench"] == "fusion"
