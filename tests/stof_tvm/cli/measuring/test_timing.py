"""Warm-up, interleaving, medians and quartiles."""

import torch

from stof_tvm.cli.measuring import timing
from stof_tvm.signature import read_signature


def test_calls_are_warmed_up_and_take_turns(monkeypatch):
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
    order = []
    rows = timing.time_calls({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, "cpu", 4)
    assert "".join(order) == "aaa" + "bbb" + "abababab"
    assert [(row["system"], len(row["samples_ms"])) for row in rows] == [("a", 4), ("b", 4)]


def test_quartiles(monkeypatch):
    clock = iter([0, 0.0, 1, 1, 1, 0.0, 0.001, 0.0, 0.002, 0.0, 0.003, 0.0, 0.004, 0.0, 0.005])
    monkeypatch.setattr(timing, "WARM_UP_CALLS", 0)
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_warm_up", lambda call, device: [next(clock) for _ in range(5)])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    (row,) = timing.time_calls({"a": lambda: None}, "cpu", 5)
    assert row["samples_ms"] == [1, 2, 3, 4, 5] and row["median_ms"] == 3 and row["quartiles_ms"] == [2, 4]


def test_one_sample():
    (row,) = timing.time_calls({"a": lambda: None}, "cpu", 1)
    assert row["quartiles_ms"] == [row["median_ms"]] * 2 and row["samples_ms"] == [row["median_ms"]]


class Gather(torch.nn.Module):
    def forward(self, ids, table, keep=None):
        return torch.where(keep, table[ids], 0.0)


def test_random_inputs_fit_the_signature():
    example = torch.tensor([3, 4]), torch.randn(5, 2, dtype=torch.float64)
    keep = torch.tensor([[True], [False]])
    program = torch.export.export(Gather(), example, {"keep": keep})
    signature = read_signature(program, Gather().forward)
    args, kwargs = timing.random_inputs(signature, "cpu")
    assert [(x.shape, x.dtype) for x in (*args, kwargs["keep"])] == [(x.shape, x.dtype) for x in (*example, keep)]
    assert set(args[0].tolist()) <= {0, 1} and kwargs["keep"].all() and args[1].std() > 0
    assert len(signature.flatten(args, kwargs)) == 3
