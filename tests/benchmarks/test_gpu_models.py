"""The models benchmark: its cases and models, the peers' masks, processes that fail, resumed plans, the report."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_models
from benchmarks.models import measure
from benchmarks.models.cases import MODELS, ModelCase, model_cases, tiny
from benchmarks.models.families import image_size, is_causal, make_inputs, make_model
from benchmarks.models.peers import torch_model, whole_mask
from benchmarks.models.report import line, page
from benchmarks.models.results import ModelResults
from benchmarks.models.systems import System
from benchmarks.peers.patterns import shared_pattern

BERT = ModelCase("bert", 1, 128)


@pytest.fixture
def model_row():
    """A function that makes a result row as a measuring run writes it."""

    def make(case, system, us=None, **fields):
        row = {"bench": "models", "gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-21", "commit": "abc"}
        row |= {"run": "one", "case": case.to_json(0.3), "system": system}
        if us is not None:
            row |= {"variant": "some", "median_us": us, "wall_us": us + 50, "samples_us": [us], "error": 1e-3}
            row |= {"half_error": 2e-3, "prepare_s": 20.0, "kernels": [["gemm", 12, 6 * us / 10]]}
        return row | fields

    return make


def pattern_of(case):
    return shared_pattern(case.mask, case.sequence, case.sequence, "cpu")


def test_cases_are_all_that_is_asked_for():
    cases = model_cases()
    assert len(set(cases)) == len(cases) == 20
    for case in cases:
        assert ModelCase.from_row({"case": case.to_json(0.5)}) == case
    assert [image_size(n) for n in (128, 512, 2048)] == [(128, 256), (256, 512), (512, 1024)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_peers_mask_is_the_models_with_ours(name):
    """A token that no other may see changes only its own hidden state, but where the position before it is shared."""
    case = tiny(ModelCase(name, 1, 128))
    pattern = pattern_of(case)
    keep = whole_mask(case, pattern)
    assert not is_causal(case) or not keep.triu(1).any()
    with torch.no_grad():
        x, y = make_inputs(case, 2, "cpu")
        out = torch_model(case, pattern, "cpu", small=True).float()(x.float() if x.is_floating_point() else x)
        assert out.shape[:2] == (1, case.sequence) and out.isfinite().all()
        if name == "vit":
            return
        token = int((~keep).sum(0).argmax())
        mixed = x.clone()
        mixed[:, token] = (x[:, token] + 1) % 30000
        changed = (torch_model(case, pattern, "cpu", small=True).float()(mixed) != out).any(-1)[0]
    assert torch.equal(changed, keep[:, token] | (torch.arange(case.sequence) == token))


def test_models_of_one_case_have_the_same_weights():
    first, second = (make_model(tiny(BERT), small=True).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_an_unmasked_result_is_wrong():
    case = tiny(BERT)
    model = make_model(case, small=True)
    (x,) = make_inputs(case, 1, "cpu")
    right = torch_model(case, pattern_of(case), "cpu", small=True)
    with torch.no_grad():
        error, half_error = measure.errors(System(right, ""), case, x, "cpu", small=True)
        assert 0 < error <= half_error < 1e-2
        error, half_error = measure.errors(System(model, ""), case, x, "cpu", small=True)
        assert error > 2 * half_error


def options(tmp_path, *arguments):
    return gpu_models.parse_arguments(["--out", str(tmp_path / "rows.json"), *arguments])


def test_what_is_measured_is_not_measured_again(tmp_path, model_row):
    some = options(tmp_path, "--model", "bert", "--shape", "1x128", "8x512", "--systems", "stof,eager")
    assert len(gpu_models.make_plan(some)) == 4
    rows = [model_row(BERT, "stof", 300.0), model_row(BERT, "eager", failed="no memory")]
    some.out.write_text(json.dumps(rows))
    assert [(case.shape, system) for case, system in gpu_models.make_plan(some)] == [
        ("1x128", "eager"),
        ("8x512", "stof"),
        ("8x512", "eager"),
    ]


class FakeConnection:
    """The pipe of a process that sends some messages, and then dies or says nothing more."""

    def __init__(self, *messages, dies=False):
        self.messages, self.dies, self.sent = list(messages), dies, []

    def poll(self, _seconds):
        return bool(self.messages) or self.dies

    def recv(self):
        if not self.messages:
            raise EOFError
        return self.messages.pop(0)

    def send(self, message):
        self.sent.append(message)


def worker(connection):
    some = object.__new__(gpu_models.Worker)
    some.connection, some.row, some.ready = connection, None, False
    some.process = SimpleNamespace(exitcode=-11, join=lambda: None, kill=lambda: None)
    return some


@pytest.mark.parametrize(
    "connection, row",
    [
        (FakeConnection(("ready", None), ("row", {"median_us": 1.0})), {"median_us": 1.0}),
        (FakeConnection(("row", {"failed": "a mask"})), {"failed": "a mask"}),
        (FakeConnection(dies=True), {"failed": "the process died with exit code -11"}),
        (FakeConnection(("ready", None), dies=True), {"failed": "the process died with exit code -11"}),
        (FakeConnection(), {"failed": "not ready in time"}),
        (FakeConnection(("ready", None)), {"failed": "not measured in time"}),
    ],
    ids=["measured", "raised", "died", "died when measured", "late", "late when measured"],
)
def test_a_process_costs_one_row(connection, row):
    assert worker(connection).measure(time.monotonic()) == row


def test_what_is_late_may_still_come():
    some = worker(FakeConnection())
    assert not some.is_ready(time.monotonic())
    some.connection.messages += [("ready", None), ("row", {"median_us": 1.0})]
    assert some.is_ready(time.monotonic()) and some.is_ready(time.monotonic())
    assert some.measure(time.monotonic()) == {"median_us": 1.0}


def test_the_report_tells_losses_and_failures(model_row):
    rows = [
        model_row(BERT, "stof", 300.0),
        model_row(BERT, "compile-sdpa", 450.0),
        model_row(BERT, "compile-flex", failed="RuntimeError: no"),
        model_row(ModelCase("vit", 8, 512), "stof", 2000.0),
        model_row(ModelCase("vit", 8, 512), "compile-sdpa", 1000.0),
        model_row(ModelCase("vit", 8, 512), "eager", 100.0, error=1.0),
    ]
    results = ModelResults(rows)
    text = page(results)
    assert "- 0.50× vit 8x512 bigbird: 2000 against 1000 of compile-sdpa" in text
    assert "- compile-flex, 1 cases (bert 1x128 bigbird): RuntimeError: no" in text
    assert "- eager at vit 8x512 bigbird: error 1.00e+00" in text
    assert "| bert | 1 × 128 | 0.300 | 300 | 1.50× | – | 450 (1.50) | – |" in text
    assert "`gemm` 12 × 15.0" in text
    assert line(results, BERT).split() == [
        *"bert 1x128 bigbird 1.50× compile-sdpa: stof 300.0 (350)".split(),
        *"compile-sdpa 450.0 (500) compile-flex failed".split(),
    ]
