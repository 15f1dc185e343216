"""Several processes on one log and one cache, threads on one engine, memory over many calls."""

import ctypes
import gc
import inspect
import itertools
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.running.native_log import without_noise
from stof_tvm.tuning.logs.log import TuningLog
from tests.models.quick_llvm import QUICK_LLVM
from tests.robustness.conftest import LENGTH, WIDTH, Attention, count
from tests.robustness.processes import Process
from tests.stof_tvm.tuning.logged import OTHER, TARGET, WORKLOAD, trace

ROOT = Path(__file__).parents[2]
CALLS = count(1500, 10_000)
WARM_UP = 300
LOADS, BUILDS = count(30, 1000), count(5, 1000)
GROWTH = 1 << 20  # bytes that allocators may still take after the warm-up
THREADS, ROUNDS = 4, 40


def inputs(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(1, LENGTH, WIDTH, generator=generator) for _ in range(number)]


def test_tuners_and_readers_share_a_log(tmp_path):
    """Four processes add, one of them is killed, one reads: every record that was told of is there, once."""
    choices = [(WORKLOAD, trace(n)) for n in range(3)] + [(OTHER, trace(0, OTHER))]

    def tuner(name: str, limit: int | None):
        def work(tell):
            log = TuningLog(tmp_path, TARGET)
            for number in itertools.islice(itertools.count(), limit):
                workload, made = choices[number % 4]
                log.add(workload, made, 1.0 + number if number % 3 else "it hung", name)
                if number % 5 == 0:
                    log.save_scheme("graph", "0x4f", 1e6 / (1 + number), name)
                tell()

        return work

    def read(tell):
        log, most = TuningLog(tmp_path, TARGET), 0
        while most < 60:
            log.refresh()
            assert len(log.records(WORKLOAD)) >= most
            most = len(log.records(WORKLOAD))
            tell()

    tuners = {f"GPU {number}": Process(tuner(f"GPU {number}", 30)) for number in range(3)}
    killed, reader = Process(tuner("killed", None)), Process(read)
    assert [process.wait() for process in tuners.values()] == [0, 0, 0]
    killed.kill()
    assert reader.wait() == 0 and reader.told > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a line that is not whole
        log = TuningLog(tmp_path, TARGET)
    found = [record.gpu for key in log.keys for record in log.records(key)]
    assert all(found.count(name) == 30 for name in tuners)
    assert killed.told <= found.count("killed") <= killed.told + 1
    assert {scheme.gpu for scheme in log.schemes["graph"]} >= set(tuners)


BUILDER = """
import sys
import torch
import stof_tvm
from stof_tvm import masks
from tests.models.quick_llvm import QUICK_LLVM
from tests.robustness.conftest import LENGTH, WIDTH, Attention

torch.manual_seed(0)
q = torch.randn(1, 2, 32, 8)
mask = masks.causal()
out = stof_tvm.sparse_attention(q, q, q, mask)
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
torch.testing.assert_close(out, expected)
model, x = Attention().eval(), torch.randn(1, LENGTH, WIDTH)
engine = stof_tvm.build(model, QUICK_LLVM, (x,), mask=mask, tuning_logs=False)
for _ in range(3):
    engine.save(sys.argv[1])
    torch.testing.assert_close(stof_tvm.load(sys.argv[1])(x), engine(x))
"""


@pytest.mark.slow  # starts Python twice
def test_builders_share_a_cache_and_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "engine.stof")]
    builders = [subprocess.Popen(command, cwd=tmp_path) for _ in range(2)]
    assert [builder.wait() for builder in builders] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "engine.stof"]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".json", ".so"]


def test_threads_share_an_engine(engine):
    cases = inputs(THREADS)
    expected = [engine(x) for x in cases]
    start = threading.Barrier(THREADS)

    def call(number: int) -> bool:
        start.wait()
        return all(torch.equal(engine(cases[number]), expected[number]) for _ in range(ROUNDS))

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(call, range(THREADS)))


@pytest.mark.slow  # compiles four times
def test_threads_build_and_call_at_once():
    """Models of each thread's own and one of all; PyTorch and `inspect` are left as they were."""
    shared, start = Attention().train(), threading.Barrier(THREADS)
    transformer = torch.nn.modules.transformer
    before = transformer._detect_is_causal_mask, inspect.stack, torch.nn.Module.__call__

    def build(number: int) -> bool:
        model = shared if number % 2 else Attention().train()
        (x,) = inputs(1)
        start.wait()
        engine = stof_tvm.build(model, QUICK_LLVM, (x,), mask=masks.sliding_window(number + 1), tuning_logs=False)
        q = torch.randn(1, 1, 16, 8)
        kept = masks.sliding_window(number + 2)
        out = stof_tvm.sparse_attention(q, q, q, kept)
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, kept.dense(16))
        again = stof_tvm.build(model, QUICK_LLVM, (x,), mask=masks.sliding_window(number + 1), tuning_logs=False)
        return torch.equal(engine(x), again(x)) and torch.allclose(out, expected, atol=1e-5)

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(build, range(THREADS)))
    assert shared.training and shared.out.training  # not sooner: while one thread exports it, it is in evaluation mode
    assert (transformer._detect_is_causal_mask, inspect.stack, torch.nn.Module.__call__) == before


def test_threads_save_and_load(engine, tmp_path, capfd):
    """And leave stderr as it was."""
    (x,) = inputs(1)
    expected = engine(x)

    def save_and_load(number: int) -> bool:
        path = tmp_path / f"{number % 2}.stof"
        engine.save(path)
        return torch.equal(stof_tvm.load(path)(x), expected)

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(save_and_load, range(2 * THREADS)))
    print("still here", file=sys.stderr)
    assert capfd.readouterr().err == "still here\n"


def test_stderr_is_held_by_one_thread_at_a_time(capfd):
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with without_noise():
            inside.set()
            leave.wait()

    first, second = (threading.Thread(target=hold) for _ in range(2))
    first.start()
    inside.wait()
    second.start()
    second.join(0.1)  # it would be inside by now
    leave.set()
    first.join()
    second.join()
    print("still here", file=sys.stderr)
    assert capfd.readouterr().err == "still here\n"


def resident() -> int:
    """Bytes in memory, without what C's allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def mapped_libraries() -> int:
    """How many libraries of engines and kernels are mapped."""
    return len({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "stof_" in line})


def grown_by(work, times: int, warm_up: int) -> int:
    for _ in range(warm_up):
        work()
    before = resident()
    for _ in range(times):
        work()
    return resident() - before


def test_calls_leave_memory_flat(engine):
    (x,) = inputs(1)
    assert grown_by(lambda: engine(x), CALLS, WARM_UP) < GROWTH


@pytest.mark.parametrize("is_called", [False, True])
def test_loads_leave_memory_flat(engine, tmp_path, is_called):
    """An engine that is gone gives back its library and its weights."""
    (x,) = inputs(1)
    engine.save(tmp_path / "engine.stof")

    def load():
        loaded = stof_tvm.load(tmp_path / "engine.stof")
        if is_called:
            loaded(x)

    before = mapped_libraries()
    assert grown_by(load, LOADS, 10) < GROWTH
    assert mapped_libraries() == before


def test_what_an_engine_gave_outlives_it(engine, tmp_path):
    (x,) = inputs(1)
    engine.save(tmp_path / "engine.stof")
    out = stof_tvm.load(tmp_path / "engine.stof")(x)
    gc.collect()
    assert torch.equal(out, engine(x))


@pytest.mark.slow  # builds
def test_builds_leave_memory_flat():
    model, (x,) = Attention().eval(), inputs(1)

    def build():
        stof_tvm.build(model, QUICK_LLVM, (x,), mask=masks.causal(), tuning_logs=False)(x)

    assert grown_by(build, BUILDS, 5) < 4 * GROWTH + BUILDS * (GROWTH // 20)
