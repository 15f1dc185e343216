"""Tuning on other machines: a tracker and two servers on loopback."""

import os

import pytest
import torch

import stof_tvm
from stof_tvm.errors import InputError
from stof_tvm.tuning.logs.log import TuningLog
from stof_tvm.tuning.measuring.rpc import rpc_runner
from stof_tvm.tuning.search.state import Options
from tests.models.families import BertLike
from tir_kernels.target import parse_target


@pytest.mark.parametrize(
    ("tracker", "key", "why"),
    [("localhost", "key", "host:port"), ("localhost:many", "key", "host:port"), ("localhost:9190", None, "rpc_key")],
)
def test_wrong_arguments(tracker, key, why):
    with pytest.raises(InputError, match=why):
        rpc_runner(tracker, key, 1)


@pytest.mark.slow
def test_a_model_is_tuned_through_a_tracker_and_two_servers(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # one process compiles: each starts for seconds
    pytest.importorskip("tornado", reason="TVM's tracker needs it")
    from tvm.rpc.server import Server
    from tvm.rpc.tracker import Tracker

    tracker = Tracker(host="127.0.0.1", port=9190, port_end=9290, silent=True)
    address = "127.0.0.1", tracker.port
    servers = [
        Server(host="127.0.0.1", port=9300, port_end=9400, tracker_addr=address, key="cpu", silent=True)
        for _ in range(2)
    ]
    try:
        result = stof_tvm.tune(
            BertLike(dim=32, heads=2, layers=1, length=16).eval(),
            "llvm",
            (torch.arange(16)[None],),
            work_dir=tmp_path,
            max_trials=12,
            progress=False,
            rpc_tracker=f"127.0.0.1:{tracker.port}",
            rpc_key="cpu",
            options=Options(cost_model=False, stage_one=False),
        )
    finally:
        for server in servers:
            server.terminate()
        tracker.terminate()
    assert len(result.history) == 12 and result.best["us"] > 0
    assert sum(trial.us is not None for trial in result.history) >= 10
    log = TuningLog(tmp_path, parse_target("llvm"))
    assert {record.gpu for key, _ in log.workloads() for record in log.records(key)} == {"cpu"}
