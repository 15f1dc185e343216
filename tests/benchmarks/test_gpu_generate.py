"""The benchmark of generation: its cases and models, what tokens tell of errors, times of steps, the report."""

import json
import time

import pytest
import torch

from benchmarks import gpu_generate
from benchmarks.generation import measure, reference
from benchmarks.generation.cases import DECODE, FIRST, TINY, GenerateCase, generate_cases
from benchmarks.generation.measure import Stamps, errors, get_ready
from benchmarks.generation.models import cache_bytes, make_model, make_prompts
from benchmarks.generation.report import line, page
from benchmarks.generation.requirements import lines, ratio
from benchmarks.generation.systems import System, prepare
from benchmarks.models.results import ModelResults

LONG = GenerateCase(DECODE, "Llama-3.2-1B", 16, 32768, 64, 1024)
CAUSAL = GenerateCase(DECODE, "Qwen3-0.6B", 1, 4096, 64, 0)
PROMPT = GenerateCase(FIRST, "Llama-3.2-1B", 1, 8193, 1, 1024)
SMALL = GenerateCase(DECODE, "Qwen3-0.6B", 2, 24, 4, 8)


@pytest.fixture
def generate_row():
    """A function that makes a result row as a measuring run writes it."""

    def make(case, system, us=None, **fields):
        row = {"bench": "generate", "gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-25", "commit": "abc"}
        row |= {"run": "one", "case": case.to_json(), "system": system}
        if us is not None:
            row |= {"variant": "some", "median_us": us, "wall_us": us, "samples_us": [us], "error": 1e-3}
            row |= {"half_error": 2e-3, "prepare_s": 20.0}
            row |= {"tokens_per_s": case.batch * 1e6 / us} if case.kind == DECODE else {}
        return row | fields

    return make


def options(tmp_path, *arguments):
    some = gpu_generate.parse_arguments(["--out", str(tmp_path / "rows.json"), *arguments])
    some.log = tmp_path / "log"
    return some


def greedy(model, ids, count):
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


def test_cases_are_all_that_is_asked_for():
    cases = generate_cases()
    assert len(set(cases)) == len(cases) == 2 * (2 * 4 * 2 + 1)
    assert {LONG, CAUSAL, PROMPT} < set(cases) and PROMPT.prompt == 8192 and LONG.prompt == 32704
    for case in cases:
        assert GenerateCase.from_row({"case": case.to_json()}) == case


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-0.6B"])
def test_a_window_has_the_same_weights_and_sees_less(name):
    windowed = GenerateCase(DECODE, name, 1, 24, 4, 8)
    model, causal = make_model(windowed, small=True), make_model(windowed, small=True, windows=False)
    weights, others = model.state_dict(), causal.state_dict()
    assert weights.keys() == others.keys() and all(torch.equal(weights[key], others[key]) for key in weights)
    ids = make_prompts(windowed, "cpu")
    changed = ids.clone()
    changed[:, 0] += 1
    with torch.no_grad():
        for one, sees in ((model, False), (causal, True)):
            logits = [one.float()(x, use_cache=False).logits[0] for x in (ids, changed)]
            moved = (logits[0] != logits[1]).any(-1)
            assert moved[:8].all() and moved[-1] == sees  # two layers of windows reach 15 tokens


@pytest.mark.parametrize("window", [0, 8])
def test_the_reference_computes_what_sdpa_does(window):
    case = GenerateCase(DECODE, "Llama-3.2-1B", 1, 24, 4, window)
    reference.register()
    ids = make_prompts(case, "cpu")
    with torch.no_grad():
        ours, theirs = (make_model(case, name, True).float()(ids).logits for name in (reference.NAME, "sdpa"))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_tokens_tell_of_wrong_logits():
    right = greedy(make_model(SMALL, small=True), make_prompts(SMALL, "cpu"), SMALL.new)
    with torch.no_grad():
        error, half_error = errors(right, SMALL, small=True)
        assert error <= 2 * half_error < 0.1
        wrong = right.clone()
        wrong[-1, -1] = (wrong[-1, -1] + 1) % 30000
        assert errors(wrong, SMALL, small=True)[0] > 2 * half_error
        wrong[-1, 0] += 1  # the prompt is another
        assert not errors(wrong, SMALL, small=True)[0] <= 1
        assert not errors(right[:, :-1], SMALL, small=True)[0] <= 1


def test_steps_are_timed_by_what_is_streamed():
    """Prompts that are streamed first are no step; the first token does not count among the steps."""
    case = GenerateCase(DECODE, "Qwen3-0.6B", 2, 7, 3, 0)
    ids = torch.zeros(2, 4, dtype=torch.int64)

    def call(ids, new, streamer):
        streamer.put(ids)
        time.sleep(0.2)
        for _ in range(new):
            streamer.put(ids[:, 0])
            time.sleep(0.02)
        streamer.end()

    system = System(call, "")
    assert 20e3 <= measure._sample_us(system, case, ids) < 60e3
    first = GenerateCase(FIRST, "Qwen3-0.6B", 2, 5, 1, 0)
    assert 200e3 <= measure._sample_us(system, first, ids) < 400e3
    with pytest.raises(RuntimeError, match="2 steps were streamed in place of 3"):
        measure._sample_us(System(lambda ids, new, streamer: call(ids, 2, streamer), ""), case, ids)


def test_a_streamer_takes_batches():
    stamps = Stamps()
    stamps.put(torch.zeros(2, 5))
    stamps.put(torch.zeros(2))
    stamps.end()
    assert len(stamps.times) == 1


@pytest.mark.parametrize("system", ["compile-sdpa", "compile-flex"])
def test_peers_choose_what_pytorch_does(system):
    ids = make_prompts(SMALL, "cpu")
    with torch.no_grad():
        tokens = prepare(system, SMALL, "cpu", small=True).call(ids, SMALL.new)
        error, half_error = errors(tokens, SMALL, small=True)
    assert error <= 2 * half_error < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("system", ["stof", "stof-compile"])
def test_ours_is_measured(system):
    case = GenerateCase(DECODE, "Qwen3-0.6B", 1, 24, 4, 8)
    with torch.no_grad():
        _, measured = get_ready((case,), system, "cpu", True, TINY.runs)
        (row,) = measured()
    assert row["case"] == case and row["error"] <= 2 * row["half_error"] < 0.1
    assert row["tokens_per_s"] == pytest.approx(1e6 / row["median_us"], rel=1e-3)


@pytest.mark.slow
def test_a_dry_run_writes_rows(tmp_path):
    some = options(tmp_path, "--dry-run", "--only", "first Llama", "--systems", "compile-sdpa")
    assert gpu_generate.run(some) == 0
    (row,) = json.loads(some.out.read_text())
    assert row["system"] == "compile-sdpa" and row["error"] <= 2 * row["half_error"] and "tokens_per_s" not in row
    assert gpu_generate.make_plan(some) == []


def test_ours_and_the_first_peer_come_first(tmp_path):
    jobs = gpu_generate.all_jobs(options(tmp_path))
    assert len(set(jobs)) == len(jobs) == 4 * len(generate_cases())
    assert {system for _, system in jobs[: len(jobs) // 2]} == {"stof", "compile-sdpa"}
    assert [system for _, system in jobs[:2]] == ["stof", "compile-sdpa"] and jobs[0][0] == jobs[1][0]


def test_processes_fit_a_gpu_together():
    longest = GenerateCase(DECODE, "Qwen3-0.6B", 16, 32768, 64, 0)
    layers, heads, width = 28, 8, 128
    assert cache_bytes(longest) == 2 * 16 * 32768 * layers * heads * width * 2
    jobs = [((CAUSAL,), "stof"), ((CAUSAL,), "compile-sdpa"), ((longest,), "stof")]
    assert gpu_generate.fitting(jobs, 80 << 30) == 2
    assert gpu_generate.fitting(jobs[2:] * 2, 80 << 30) == 1  # it alone may be too large: it fails then
    assert gpu_generate.fitting(jobs, 170 << 30) == 3
    peers = [((longest,), "compile-sdpa")] * 3  # engines hold their caches twice while they are built, peers do not
    assert gpu_generate.fitting(peers, 170 << 30) == 2 and gpu_generate.fitting(jobs[2:] * 2, 170 << 30) == 1


def test_what_failed_is_measured_again(tmp_path, generate_row):
    some = options(tmp_path, "--only", LONG.label, "--systems", "stof,compile-sdpa")
    some.out.write_text(json.dumps([generate_row(LONG, "stof", 9.0), generate_row(LONG, "compile-sdpa", failed="no")]))
    assert gpu_generate.make_plan(some) == [((LONG,), "compile-sdpa")]


def test_requirements_are_ratios_of_the_rows(generate_row):
    rows = [
        generate_row(LONG, "stof", 1000.0), generate_row(LONG, "compile-sdpa", 1900.0),
        generate_row(LONG, "compile-flex", failed="no memory"), generate_row(LONG, "stof-compile", 1200.0),
        generate_row(CAUSAL, "stof", 1000.0), generate_row(CAUSAL, "compile-sdpa", 1500.0),
        generate_row(CAUSAL, "compile-flex", 1300.0),
        generate_row(PROMPT, "stof", 9000.0, error=1.0), generate_row(PROMPT, "compile-sdpa", 20000.0),
    ]  # fmt: skip
    results = ModelResults(rows, GenerateCase)
    everywhere, windows, first = lines(results)
    assert everywhere.ratios == {LONG: 1.9, CAUSAL: 1.3} and everywhere.verdict == "pass"
    assert windows.ratios == {LONG: 1.9} and windows.verdict == "miss"
    assert first.ratios == {PROMPT: 0.0} and first.verdict == "miss"  # a wrong result is no result
    assert ratio(results, LONG, "stof-compile") == pytest.approx(1900 / 1200)
    text = page(results)
    assert "| Llama-3.2-1B | 16 | 32768 | 1024 | 1.90× | 1.6e+04 | 1.333e+04 (1.20) | 8421 (1.90) | – |" in text
    assert "- compile-flex, 1 cases (decode Llama-3.2-1B 16x32768 window 1024): no memory" in text
    assert "- stof at first Llama-3.2-1B 1x8193 window 1024: error 1.00e+00" in text
    assert line(results, CAUSAL).split()[4:7] == ["1.30×", "stof", "1000.0"]


def test_merged_rows_make_a_page(tmp_path, generate_row):
    (tmp_path / "a.json").write_text(json.dumps([generate_row(LONG, "stof", 200.0)]))
    assert gpu_generate.merge("generate", GenerateCase, page, [tmp_path / "a.json"], tmp_path) == 0
    assert (tmp_path / "nvidia-h200/generate.md").read_text().startswith("# Generation")
