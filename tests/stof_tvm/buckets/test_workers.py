"""Sizes of a range that are built in forks of the process: the same engines, the same errors."""

import copy
import math
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim

import stof_tvm
from stof_tvm import compiler
from stof_tvm.buckets import workers
from stof_tvm.buckets.engine import BucketEngine
from stof_tvm.errors import CompileError, UnsupportedError
from tests.models.quick_llvm import QUICK_LLVM
from tir_kernels import target

HERE = os.getpid()
COMPUTE_VERSION, DEVICE_NAME = 4, 5  # TVM's numbers for what is asked of a device
RANGE = {"x": {1: Dim("n", min=2, max=24)}}
BUCKETS = [6, 12, 24]


class Layer(nn.Module):
    """An attention, a constant that is cut to each length, and a result that is no tensor."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("places", torch.randn(24, 16))

    def forward(self, x):
        x = x + self.places[: x.shape[1]]
        q, k, v = self.qkv(x).chunk(3, -1)
        return {"rows": self.out(nn.functional.scaled_dot_product_attention(q, k, v)), "length": x.shape[1]}


def rule(when):
    """A rule that changes nothing, and calls `when(length)` in the processes that build."""

    @tvm.transform.module_pass(opt_level=0)
    class Watch:
        def transform_module(self, mod, _ctx):
            when(int(mod["main"].params[0].ty.shape[1]))
            return mod

    return [Watch()]


@pytest.fixture
def forks(monkeypatch):
    """Forks are made however fast an engine is built, and for two processors."""
    monkeypatch.setattr(workers, "WORTH_S", 0.0)
    monkeypatch.setattr(workers, "cores", lambda: 2)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Layer().eval()


def ranged(model, **options):
    x = torch.randn(2, 5, 16)
    return stof_tvm.build(model, QUICK_LLVM, x, dynamic_shapes=RANGE, buckets=BUCKETS, **options)


@torch.no_grad()
@pytest.mark.parametrize("verify", [False, True])
def test_engines_come_back_whole(forks, model, tmp_path, monkeypatch, verify):
    def note(length: int) -> None:
        (tmp_path / f"{length} {os.getpid()}").touch()

    engine = ranged(model, rules=rule(note), verify=verify)
    built = dict(map(int, path.name.split()) for path in tmp_path.iterdir())
    # The largest is built here, and what is verified: the example's bucket.
    assert {length for length, process in built.items() if process == HERE} == ({6, 24} if verify else {24})
    assert len(set(built.values())) == (2 if verify else 3)
    monkeypatch.setattr(compiler, "_compiled", None)
    for length in range(2, 25):
        x = torch.randn(2, length, 16)
        found, expected = engine(x), model(x)
        torch.testing.assert_close(found["rows"], expected["rows"], atol=2e-5, rtol=2e-5)
        assert found["length"] == length


def test_they_are_what_the_process_itself_builds(forks, model, monkeypatch):
    forked = ranged(model, verify=False)
    monkeypatch.setattr(workers, "cores", lambda: 1)
    alone = ranged(model, verify=False)
    assert forked.report().to_dict() == alone.report().to_dict()
    x = torch.randn(2, 9, 16)
    assert torch.equal(forked(x)["rows"], alone(x)["rows"])


def test_weights_are_held_once(forks, model):
    engine = ranged(model, verify=False)
    places: dict[tuple, set[int]] = {}
    for own in engine._kept().values():
        for x in own._weights.tensors:
            places.setdefault((tuple(x.shape), x.double().sum().item()), set()).add(x.data_ptr())
    assert len(places) >= 3 and all(len(same) == 1 for same in places.values())


@torch.no_grad()
def test_later_training_does_not_change_them(forks):
    model, x = Layer().eval(), torch.randn(2, 9, 16)
    engine = ranged(model, verify=False)
    before = engine(x)["rows"]
    for tensor in model.state_dict().values():
        tensor.zero_()
    assert torch.equal(engine(x)["rows"], before) and not model(x)["rows"].any()


def test_an_error_of_a_fork_is_the_builds(forks, model):
    def refuse(length: int) -> None:
        if length == 6:
            raise UnsupportedError(f"no {length} tokens, says process {os.getpid()}")

    with pytest.raises(UnsupportedError, match="no 6 tokens, says process") as found:
        ranged(model, rules=rule(refuse), verify=False)
    assert f"process {HERE}" not in str(found.value) and "transform_module" in str(found.value.__cause__)


def test_a_fork_that_something_ends_is_an_error(forks, model):
    def end(length: int) -> None:
        if length == 12:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(CompileError, match="compiled one of the range's sizes ended with signal 9: is there"):
        ranged(model, rules=rule(end), verify=False)


def test_what_only_forks_cannot_do_is_done_here(forks, model, tmp_path):
    def fail(length: int) -> None:
        (tmp_path / f"{length} {os.getpid()}").touch()
        if os.getpid() != HERE:
            raise RuntimeError("cannot re-initialize a device in a forked process")

    with pytest.warns(UserWarning, match="one after another, because a fork could not: .*re-initialize a device"):
        engine = ranged(model, rules=rule(fail), verify=False)
    assert all((tmp_path / f"{length} {HERE}").exists() for length in BUCKETS)
    assert engine(torch.randn(2, 7, 16))["length"] == 7


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: nothing can be compiled")
def test_forks_for_a_gpu_ask_no_gpu(forks, model, monkeypatch, recwarn):
    def attribute(_kind, _number, asked: int):
        if os.getpid() != HERE:
            raise RuntimeError("CUDA_ERROR_NOT_INITIALIZED")
        return {COMPUTE_VERSION: "9.0", DEVICE_NAME: "NVIDIA H100 80GB HBM3"}.get(asked, 1)

    devices = sys.modules["tvm.runtime.device"]  # `tvm.runtime.device` is the function
    monkeypatch.setattr(devices._ffi_api, "GetDeviceAttr", attribute)
    for known in (target.local_cuda_arch, target.local_gpu_name):
        known.cache_clear()
    loaded = []
    monkeypatch.setattr(workers, "load_library", loaded.append)  # there is no GPU to load them for
    monkeypatch.setattr(BucketEngine, "load", lambda self: None)
    x = torch.randn(2, 5, 16, dtype=torch.float16)
    try:
        engine = stof_tvm.build(
            copy.deepcopy(model).half(),
            *("cuda -arch=sm_90a", x),
            dynamic_shapes=RANGE,
            buckets=BUCKETS,
            verify=False,
        )
    finally:
        for known in (target.local_cuda_arch, target.local_gpu_name):
            known.cache_clear()
    assert len(loaded) == len(BUCKETS) - 1 and engine.most_engines == len(BUCKETS)
    assert not [x for x in recwarn if "a fork could not" in str(x.message)]


def test_copies_for_forks_are_the_others(model):
    weights = workers.SharedWeights()
    program = torch.export.export(model, (torch.randn(2, 24, 16),))
    private, on_cpu = weights.private(program), weights.on_cpu(program)
    assert all(private.state_dict[name] is not x for name, x in program.state_dict.items())
    own = {name: x.data_ptr() for name, x in private.state_dict.items()}
    assert {name: x.data_ptr() for name, x in on_cpu.state_dict.items()} == own  # once


def test_an_error_that_is_the_same_here_is_raised_here(forks, model):
    def fail(length: int) -> None:
        if length == 12:
            raise RuntimeError(f"a rule that fails in process {os.getpid()}")

    with pytest.raises(CompileError, match=f"a rule that fails in process {HERE}"), pytest.warns(UserWarning):
        ranged(model, rules=rule(fail), verify=False)


def test_quick_builds_stay_here(forks, model, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "WORTH_S", math.inf)
    ranged(model, rules=rule(lambda length: (tmp_path / str(os.getpid())).touch()), verify=False)
    assert [path.name for path in tmp_path.iterdir()] == [str(HERE)]


def test_a_deleted_library_is_written_by_threads_at_the_same_time(tmp_path):
    content = os.urandom(5_000_000)
    (tmp_path / "library.so").write_bytes(content)
    kept = workers._KeptFile(tmp_path / "library.so")
    (tmp_path / "library.so").unlink()
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(kept, [tmp_path / str(n) for n in range(24)])] == [None] * 24
    assert all((tmp_path / str(n)).read_bytes() == content for n in range(24))
