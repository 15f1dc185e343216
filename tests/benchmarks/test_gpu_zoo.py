"""The zoo's benchmark: models made alike, templates' kernels told from others, resumed plans, the report."""

import json

import pytest
import torch

from benchmarks import gpu_zoo
from benchmarks.models.results import ModelResults
from benchmarks.zoo.cases import ZooCase, tiny, zoo_cases
from benchmarks.zoo.make import make_inputs, make_model
from benchmarks.zoo.measure import get_ready
from benchmarks.zoo.models import MODELS
from benchmarks.zoo.outside import shares
from benchmarks.zoo.report import line, page, ratio
from benchmarks.zoo.weights import POOL, fill
from relax_passes.fusion.template_choice import NO_TEMPLATES

QWEN = ZooCase("Qwen3-0.6B", 1, 512)
MPNET = ZooCase("MPNet-base", 8, 512)


@pytest.fixture
def zoo_row():
    """A function that makes a result row as a measuring run writes it."""

    def make(case, system, us=None, **fields):
        row = {"bench": "zoo", "gpu": "NVIDIA H100", "driver": "580", "date": "2026-11-21", "commit": "abc"}
        row |= {"run": "one", "case": case.to_json(), "system": system}
        if us is not None:
            row |= {"variant": "some", "median_us": us, "wall_us": us, "samples_us": [us], "error": 1e-3}
            row |= {"half_error": 2e-3, "prepare_s": 20.0, "kernels": [], "peak_mb": 900}
        return row | fields

    return make


def options(tmp_path, *arguments):
    return gpu_zoo.parse_arguments(["--out", str(tmp_path / "rows.json"), *arguments])


def test_cases_are_all_that_is_asked_for():
    cases = zoo_cases()
    assert len(set(cases)) == len(cases) == sum(len(model.shapes) for model in MODELS.values())
    for case in cases:
        assert ZooCase.from_row({"case": case.to_json()}) == case


def test_models_of_one_case_have_the_same_weights():
    first, second = (make_model(tiny(QWEN), small=True).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {weight.dtype for weight in first.values()} == {torch.float16}
    assert first["model.norm.weight"].eq(1).all()
    assert first["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Gemma-3-1B", "DINOv2-base"])
def test_buffers_are_those_of_a_model_made_as_usual(name):
    """Rotary frequencies stay float32."""
    model = make_model(tiny(ZooCase(name, 1, 1)), small=True).model
    usual = dict(type(model)._from_config(model.config, dtype=torch.float16).named_buffers())
    buffers = dict(model.named_buffers())
    assert buffers.keys() == usual.keys()
    for key, buffer in buffers.items():
        assert buffer.dtype == usual[key].dtype and torch.equal(buffer, usual[key])


def test_tied_weights_stay_tied_and_norms_of_gemma_are_zero():
    t5 = make_model(tiny(ZooCase("T5-v1.1-base", 1, 1)), small=True).model
    assert t5.encoder.embed_tokens.weight is t5.decoder.embed_tokens.weight is t5.shared.weight
    assert make_model(tiny(ZooCase("Gemma-3-1B", 1, 1)), small=True).model.norm.weight.eq(0).all()


def test_a_weight_begins_where_the_one_before_ends():
    first, second = torch.nn.Linear(1 << 12, 1 << 12, bias=False), torch.nn.Linear(8, 8, bias=False)
    fill(torch.nn.Sequential(first.half(), second.half()))
    flat, repeated = first.weight.flatten(), first.weight.numel() - POOL
    assert torch.equal(flat[POOL:], flat[:repeated])
    assert torch.equal(second.weight.flatten(), flat[repeated : repeated + 64])


def test_a_model_without_sdpa_gets_eager_attention():
    assert make_model(tiny(MPNET), small=True).attention == "eager"
    assert make_model(tiny(QWEN), small=True).attention == "sdpa"
    with pytest.raises(ValueError):
        make_model(tiny(MPNET), "flex_attention", small=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs(name):
    case = tiny(ZooCase(name, 1, 1))
    with torch.no_grad():
        out = make_model(case, small=True)(*make_inputs(case, 1, "cpu"))
    assert out.ndim == 3 and out.isfinite().all() and out.std() > 0


@pytest.mark.slow
@pytest.mark.parametrize("system", ["stof", "compile-flex", "eager"])
def test_a_system_is_measured(system):
    with torch.no_grad():
        facts, measure = get_ready(tiny(QWEN), system, "cpu", small=True)
        row = facts | measure()
    assert row["error"] <= 2 * row["half_error"] < 0.1
    assert row["kernels"] == [] and "outside" not in row
    assert ("flex" in row["variant"]) == (system == "compile-flex")
    if system == "stof":
        assert row["build_s"] > 0 and row["dense"] == []
        assert all(reason == NO_TEMPLATES for _, reason, _ in row["defaults"])


@pytest.mark.slow
def test_a_dry_run_writes_rows(tmp_path):
    some = options(tmp_path, "--dry-run", "--model", "DistilBERT-base", "--systems", "stof,eager", "--workers", "2")
    some.log = tmp_path / "log"
    assert gpu_zoo.measure(some) == 0
    rows = json.loads(some.out.read_text())
    assert [row["system"] for row in rows] == ["stof", "eager"]
    assert not any("failed" in row for row in rows)
    assert gpu_zoo.make_plan(some) == []


def test_the_tuned_system_needs_the_folder_of_its_logs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        options(tmp_path, "--systems", "stof,stof-tuned")
    assert "stof-tuned needs --logs" in capsys.readouterr().err
    assert options(tmp_path, "--systems", "stof-tuned", "--logs", "here").logs.name == "here"


def test_what_failed_is_measured_again(tmp_path, zoo_row):
    some = options(tmp_path, "--model", "Qwen3-0.6B", "--shape", "1x512")
    some.out.write_text(json.dumps([zoo_row(QWEN, "stof", 300.0), zoo_row(QWEN, "compile-sdpa", failed="no memory")]))
    assert gpu_zoo.make_plan(some) == [(QWEN, "compile-sdpa"), (QWEN, "compile-flex")]


def test_kernels_of_templates_are_told_from_others():
    kernels = [
        ["fused_gemm12_kernel", 10, 50.0],
        ["fused_gemm_norm_kernel", 1, 5.0],
        ["fused_row_chain1_kernel", 4, 10.0],
        ["fused_mlp_kernel", 2, 5.0],
        ["sparse_attention_warp_specialized_kernel_1", 3, 10.0],
        ["fused_gemm_like_kernel", 1, 4.0],
        ["fused_multiply_negative_concatenate_kernel", 2, 16.0],
        ["Memcpy DtoD (Device -> Device)", 2, 7.0],
    ]
    assert shares(kernels) == {"launches": 23, "copies": [2, 7.0], "outside": 0.2}
    assert shares([]) == {}


def test_the_report_tells_the_mean_losses_and_failures(zoo_row):
    kernels = [["fused_gemm_kernel", 4, 80.0], ["take_kernel", 2, 20.0], ["Memcpy DtoD (Device -> Device)", 1, 2.0]]
    ours = {"build_s": 21.4, "kernels": kernels, **shares(kernels)}
    rows = [
        zoo_row(QWEN, "stof", 100.0, **ours),
        zoo_row(QWEN, "compile-sdpa", 400.0),
        zoo_row(QWEN, "compile-flex", 200.0),
        zoo_row(QWEN, "eager", 800.0, peak_mb=1200),
        zoo_row(QWEN, "stof-tuned", 95.0),
        zoo_row(MPNET, "stof", 100.0),
        zoo_row(MPNET, "compile-sdpa", 50.0),
        zoo_row(MPNET, "compile-flex", failed="ValueError: no flex"),
    ]
    results = ModelResults(rows, ZooCase)
    text = page(results)
    assert ratio(results, QWEN) == 2 and ratio(results, MPNET) == 0.5
    assert "Geometric mean: **1.00×** of the faster torch.compile over 2 of 2 cases; faster in 1" in text
    columns = "100 | 2.00× | 95 (0.95) | 400 (4.00) | 200 (2.00) | 800 (8.00) | 20% | 6 | 21 | 900 / 1200"
    assert f"| Qwen3-0.6B | 1 × 512 | {columns} |" in text
    assert "stof-tuned" not in text.split("## Losses")[1]
    assert "- 0.50× MPNet-base 8x512: 100 against 50 of compile-sdpa" in text
    assert "- compile-flex, 1 cases (MPNet-base 8x512): ValueError: no flex" in text
    assert "`fused_gemm_kernel` 4 × 20.0, **`take_kernel`** 2 × 10.0, `Memcpy DtoD" in text
    assert line(results, QWEN).split()[2:5] == ["2.00×", "stof", "100.0"]


def test_merged_rows_are_the_newest(tmp_path, zoo_row):
    old = zoo_row(QWEN, "stof", 300.0, date="2026-11-20")
    (tmp_path / "a.json").write_text(json.dumps([zoo_row(QWEN, "stof", 200.0)]))
    (tmp_path / "b.json").write_text(json.dumps([old]))
    assert gpu_zoo.merge([tmp_path / "a.json", tmp_path / "b.json"], tmp_path) == 0
    (row,) = json.loads((tmp_path / "nvidia-h100/zoo.json").read_text())
    assert row["median_us"] == 200.0
    assert (tmp_path / "nvidia-h100/zoo.md").read_text().startswith("# Zoo")
