"""The benchmark of products: its list and how it is made, a dry run on the CPU, what must be reached, merged files."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_products
from benchmarks.products import record
from benchmarks.products.cases import ProductCase, product_cases, tiny
from benchmarks.products.cublas import call_of, systems_for
from benchmarks.products.measure import Inputs
from benchmarks.products.record import LEAST_ROWS, WANTED_ROWS, case_of, is_near, merged, with_rows
from benchmarks.products.results import ProductResults, lines
from tir_kernels.fusion.gemm.sizes.configs import MEASURED
from tir_kernels.fusion.problem import GemmProblem, Norm, Step
from tir_kernels.fusion.reference import fusion_reference
from tir_kernels.target import parse_target

SCRIPT = Path(gpu_products.__file__)
FIRST = ProductCase(4096, 3072, 768, bias=True)
RAGGED = ProductCase(4096, 50257, 768)
KINDS = (
    ProductCase(32, 24, 16),
    ProductCase(32, 20, 16, bias=True),
    ProductCase(32, 24, 16, bias=True, w_layout="kn"),
    ProductCase(32, 24, 16, w_layout="kn"),
    ProductCase(64, 24, 16, bias=True, batch=4, matrices=2),
    ProductCase(64, 24, 16, w_layout="kn", batch=4, matrices=4),
)


@pytest.fixture
def product_row():
    """A function that makes a result row as a measuring run writes it."""

    def make(case, system, us=None, **fields):
        row = {"bench": "products", "gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-21", "commit": "abc"}
        row |= {"run": "one", "case": case.to_json(), "system": system}
        if us is not None:
            row |= {"variant": f"{system} kernel", "median_us": us, "wall_us": us, "samples_us": [us], "error": 1e-4}
            row |= {"half_error": 2e-4, "predicted_us": us}
        return row | fields

    return make


def test_the_list_has_every_kind_once_and_enough_rows():
    cases = product_cases()
    assert len(set(cases)) == len(cases) > 50 and merged(set(cases)) == cases
    for case in cases:
        assert case.m >= WANTED_ROWS and ProductCase.from_row({"case": case.to_json()}) == case
        assert with_rows(case) == case and case_of(case.problem) == case
    assert {case.n for case in cases} >= {50257, 30522}  # vocabularies that are no multiple of 8
    assert {case.bias for case in cases} == {True, False} and any(case.batch > 1 for case in cases)


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.label)
def test_cublas_computes_what_the_problem_says(case):
    inputs = Inputs(case, "cpu", seed=1)
    (expected,) = fusion_reference(case.problem, *(x.double() for x in inputs.sets[0]))
    torch.testing.assert_close(inputs.expected.double(), torch.from_numpy(expected))
    for system in systems_for(case)[:1]:
        assert inputs.error(call_of(system, case, inputs.sets[0])()) <= inputs.half_error < 1e-2
    assert inputs.error(torch.full_like(inputs.expected, float("nan"))) != 0
    alone = call_of("cublas-alone", case, inputs.sets[0])().reshape(case.m, case.n)
    bias = inputs.sets[0][2][: case.n].float() if case.bias else 0
    torch.testing.assert_close(alone.float() + bias, inputs.expected, atol=2e-2, rtol=1e-2)


def test_products_count_without_their_epilogues():
    steps = (Step("add", "row"), Step("gelu"), Step("add", "matrix"))
    assert case_of(GemmProblem(4096, 3072, "float16", steps, k=768)) == FIRST
    gated = GemmProblem(4096, 1536, "float16", steps[2:], k=768, gate="silu", gate_bias=True)
    assert case_of(gated) == FIRST
    normed = GemmProblem(4096, 3072, "float16", k=768, a_norm=Norm("rms_norm", 1e-5, False, False), statistics=True)
    assert case_of(normed) == replace(FIRST, bias=False)


def test_few_rows_are_left_out_and_a_batch_is_doubled():
    assert with_rows(replace(FIRST, m=LEAST_ROWS - 1)) is None
    assert with_rows(replace(FIRST, m=3152)).m == 6304
    parts = with_rows(ProductCase(1024, 64, 64, batch=8, matrices=4))
    assert (parts.m, parts.batch, parts.matrices) == (4096, 32, 4)


def test_near_duplicates_differ_by_rows_or_by_a_vocabulary_as_even():
    assert is_near(FIRST, replace(FIRST, m=4300)) and not is_near(FIRST, replace(FIRST, m=6304))
    assert not is_near(FIRST, replace(FIRST, n=3080)) and not is_near(FIRST, replace(FIRST, bias=False))
    assert is_near(RAGGED, replace(RAGGED, n=49153)) and not is_near(RAGGED, replace(RAGGED, n=50256))
    assert merged({FIRST, replace(FIRST, m=4300), RAGGED}) == [RAGGED, replace(FIRST, m=4300)]


@pytest.mark.slow
def test_products_of_a_model_are_those_of_its_segments():
    """A LLaMA's: packed projections of queries, keys and values, of attention, of a gate and its values, and so on."""
    (case,) = [case for case in record.largest_cases() if case.model == "SmolLM2-360M"]
    found = {(one.m, one.n, one.k, one.bias) for one in record.products_of(case)}
    width, kv, inner = 960, 320, 2560
    wanted = {(width + 2 * kv, width), (width, width), (2 * inner, width), (width, inner), (49152, width)}
    assert found == {(4096, n, k, False) for n, k in wanted}


def test_candidates_begin_with_the_default_and_are_those_that_defaults_come_from():
    target = parse_target("cuda -arch=sm_90a")
    kernels = gpu_products.candidates(FIRST, target)
    assert len({kernel.config for kernel in kernels}) == len(kernels) > 5
    assert {kernel.config for kernel in kernels} <= MEASURED
    assert kernels[0].predicted_us == min(kernel.predicted_us for kernel in kernels)


def test_requirements_are_computed_from_rows(product_row):
    rows = [product_row(FIRST, "stof", 10.0), product_row(FIRST, "cublas", 9.8), product_row(FIRST, "cublas-alone", 9)]
    rows += [product_row(RAGGED, "stof", 10.0), product_row(RAGGED, "cublas", 9.0), product_row(RAGGED, "stof-best", 8)]
    found = {line.what: line for line in lines(ProductResults(rows))}
    assert found["every product"].verdict == "miss" and found["every product"].worst == (RAGGED, 0.9)
    assert found["(for information) the choice of the time model"].mean == pytest.approx(0.8)
    assert found["(for information) with a bias"].mean == pytest.approx(0.9)
    assert [line.verdict for line in lines(ProductResults(rows[:3]))][0] == "pass"
    wrong = [product_row(FIRST, "stof", 1.0, error=1.0), rows[1]]
    assert lines(ProductResults(wrong))[0].worst == (FIRST, 0.0)


def test_merge_writes_rows_and_page(tmp_path, product_row):
    rows = [product_row(FIRST, "stof", 10.0), product_row(FIRST, "cublas", 9.0), product_row(RAGGED, "stof")]
    rows[2]["failed"] = "RuntimeError: no"
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert gpu_products.merge([tmp_path / "a.json"], tmp_path / "results") == 0
    merged_rows = json.loads((tmp_path / "results" / "nvidia-h200" / "products.json").read_text())
    assert len(merged_rows) == 3
    page = (tmp_path / "results" / "nvidia-h200" / "products.md").read_text()
    assert "0.90× 4096x3072x768 float16 + bias: 10 against 9 of cublas" in page
    assert "stof, 1 cases (4096x50257x768 float16): RuntimeError: no" in page and "9 (0.900)" in page


def test_what_the_file_holds_is_not_measured_again(tmp_path, product_row, monkeypatch):
    monkeypatch.setattr(gpu_products, "product_cases", lambda: [FIRST, RAGGED])
    out = tmp_path / "rows.json"
    options = gpu_products.parse_arguments(["--out", str(out)])
    assert gpu_products.make_plan(options) == [FIRST, RAGGED]
    rows = [product_row(FIRST, s, 9.0) for s in ("stof", "cublas", "cublas-alone")]
    out.write_text(json.dumps(rows))
    assert gpu_products.make_plan(options) == [RAGGED]
    assert gpu_products.make_plan(gpu_products.parse_arguments(["--out", str(out), "--all-configs"])) == [FIRST, RAGGED]
    out.write_text(json.dumps([{**rows[0], "failed": "no"}, *rows[1:]]))
    assert gpu_products.make_plan(options) == [RAGGED, FIRST]


def test_tiny_cases_keep_their_kind():
    for case in (FIRST, RAGGED, ProductCase(49152, 64, 512, batch=96, matrices=12)):
        small = tiny(case)
        assert (small.bias, small.n % 8, small.batch > small.matrices) == (
            case.bias,
            case.n % 8,
            case.batch > case.matrices,
        )
        assert small.m <= 128 and small.problem


@pytest.mark.slow
def test_dry_run_goes_the_whole_way(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--workers", "1", "--out", str(out)]
    command += ["--only", "x3072x768 float16 + bias", "--arch", "sm_80"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["system"]: row for row in json.loads(out.read_text())}
    assert list(rows) == ["stof", "cublas", "cublas-alone"]
    assert "only a GPU can run it" in rows["stof"]["failed"]
    assert rows["cublas"]["error"] <= 2 * rows["cublas"]["half_error"] and rows["cublas"]["median_us"] > 0
    assert rows["cublas"]["bench"] == "products" and len({row["run"] for row in rows.values()}) == 1
