"""A full disk or a folder that cannot be written is one clear error, and what was there before stays whole."""

import sys

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.cli import main
from stof_tvm.errors import ArtifactError, TuningLogError
from stof_tvm.tuning.logs.log import FAILURES, README, RECORDS, SCHEMES, TuningLog
from stof_tvm.tuning.logs.tools import copy_best
from stof_tvm.tuning.measuring import compile_worker
from stof_tvm.tuning.measuring.measure import Measurer
from stof_tvm.tuning.search.state import Options, Search
from stof_tvm.tuning.tune import run_search
from stof_tvm.tuning.tuning_report import TuningReport
from tests.robustness.conftest import LENGTH, WIDTH
from tests.robustness.disk import full_after, read_only, snapshot
from tests.stof_tvm.tuning.fakes import CUDA, FakeBuilder, FakeRunner
from tests.stof_tvm.tuning.logged import GPU, TARGET, WORKLOAD, trace
from tir_kernels.attention import compiled as compile_kernel

X = torch.randn(1, LENGTH, WIDTH)


@pytest.fixture(params=["full", "read-only"])
def broken(request):
    """What makes a folder one that cannot be written; `room` is how long files may be on the full disk."""
    return lambda folder, room: full_after(room) if request.param == "full" else read_only(folder)


@pytest.fixture
def log(tmp_path):
    log = TuningLog(tmp_path / "logs", TARGET)
    log.add(WORKLOAD, trace(0), 12.5, GPU)
    log.add(WORKLOAD, trace(1), "it hung", GPU)
    log.save_scheme("graph", "0x4f", 1.0, GPU)
    return log


def test_an_engine(engine, broken, tmp_path):
    path = tmp_path / "engine.stof"
    engine.save(path)
    before = snapshot(tmp_path)
    with broken(tmp_path, 10_000), pytest.raises(ArtifactError, match="could not write .*engine.stof"):
        engine.save(path)
    assert snapshot(tmp_path) == before and torch.equal(stof_tvm.load(path)(X), engine(X))


def test_an_engine_that_cannot_be_unpacked(engine, tmp_path):
    engine.save(tmp_path / "engine.stof")
    with full_after(10_000), pytest.raises(ArtifactError, match="engine.stof could not be unpacked"):
        stof_tvm.load(tmp_path / "engine.stof")
    with read_only(tmp_path):  # reading is no writing
        assert stof_tvm.load(tmp_path / "engine.stof").report() == engine.report()


@pytest.mark.filterwarnings("ignore:.*is not whole")
@pytest.mark.parametrize(("outcome", "name"), [(11.0, RECORDS), ("it hung", FAILURES)])
def test_a_record(log, broken, outcome, name):
    before = snapshot(log.folder)
    with broken(log.folder.parent, len(before[name]) + 20):
        for _ in range(2):  # the second finds what the first left
            with pytest.raises(TuningLogError, match="cannot be written"):
                log.add(WORKLOAD, trace(2), outcome, GPU)
        reader = TuningLog(log.folder.parent, TARGET)
        assert len(reader.records(WORKLOAD)) == 2
    log.add(WORKLOAD, trace(2), outcome, GPU)
    again = TuningLog(log.folder.parent, TARGET)
    assert len(again.records(WORKLOAD)) == 3 and again.schemes == log.schemes
    after = snapshot(log.folder)
    assert all(after[name] == before[name] for name in (README, SCHEMES))


@pytest.mark.filterwarnings("ignore:.*is not whole")
def test_a_search(gpu_tasks, broken, tmp_path, monkeypatch):
    """Ends with the log's error, not with a thread's traceback or never."""
    monkeypatch.setattr("stof_tvm.tuning.tune.import_intrinsics", lambda: None)  # seconds
    (tmp_path / "logs").mkdir()
    with broken(tmp_path / "logs", 300):
        log = TuningLog(tmp_path / "logs", CUDA)
        measurer = Measurer(FakeBuilder(), FakeRunner(), log, "cuda", "a fake", 2)
        with pytest.raises(TuningLogError, match="cannot be written"):
            run_search(Search(log, measurer, Options(cost_model=False), 0, 40), gpu_tasks, None)
        measurer.close()
        measurer.threads.shutdown()  # whoever writes still, writes to the broken disk
    assert not [key for key in TuningLog(tmp_path / "logs", CUDA).keys if log.best(key)]


def test_a_scheme(log, broken):
    before = snapshot(log.folder)
    with broken(log.folder.parent, 50), pytest.raises(TuningLogError, match="cannot be written"):
        log.save_scheme("another", "0x4d", 2.0, GPU)
    assert snapshot(log.folder) == before


def test_merged_logs(log, broken, tmp_path):
    (tmp_path / "there").mkdir()
    with broken(tmp_path / "there", 50), pytest.raises(TuningLogError, match="cannot be written"):
        copy_best([log.folder.parent], tmp_path / "there" / "merged")


def test_a_tuning_report(broken, tmp_path):
    report = TuningReport("llvm", "a CPU", {"us": 1.0, "default_us": 2.0, "scheme": "0x4f"}, (), (), (), {})
    report.write(tmp_path / "page.html")
    before = snapshot(tmp_path)
    with broken(tmp_path, 100), pytest.raises(TuningLogError, match="page.html cannot be written"):
        report.write(tmp_path / "page.html")
    assert snapshot(tmp_path) == before


def test_compiled_kernels(broken, tmp_path, monkeypatch):
    """The cache of compiled kernels is no more than a cache."""
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path))
    compile_kernel.compile_attention.cache_clear()
    q, mask = torch.randn(1, 2, 19, 8), masks.sliding_window(7)
    with broken(tmp_path, 1000):
        out = stof_tvm.sparse_attention(q, q, q, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask.dense(19))
    torch.testing.assert_close(out, expected)
    assert snapshot(tmp_path) == {}


def test_machine_code(broken, tmp_path, monkeypatch):
    """So is the one of kernels that a search compiles."""
    monkeypatch.setattr(compile_worker, "_have_nvrtc", lambda: False)
    monkeypatch.setattr(compile_worker, "run_nvcc", lambda *_: (b"code" * 1000, ""))
    with broken(tmp_path, 1000):
        assert compile_worker._compile_source("sm_80", tmp_path, "source") == b"code" * 1000
    assert snapshot(tmp_path) == {}
    assert compile_worker._compile_source("sm_80", tmp_path, "source") == b"code" * 1000
    ((name, kept),) = snapshot(tmp_path).items()
    (tmp_path / name).write_bytes(kept[:-1])  # damaged: compiled again
    assert compile_worker._compile_source("sm_80", tmp_path, "source") == b"code" * 1000
    assert snapshot(tmp_path) == {name: kept}


def test_a_picture(broken, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    command = ["mask", "causal", "64", "--picture", str(tmp_path / "mask.png")]
    assert main(command) == 0
    before = snapshot(tmp_path)
    capsys.readouterr()
    with broken(tmp_path, 1000):
        assert main(command) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("stof: the picture cannot be written") and told.err.count("\n") == 1
    assert snapshot(tmp_path) == before


def test_commands_that_save(broken, log, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    with broken(tmp_path / "there", 50):
        assert main(["logs", "export", str(log.folder.parent), "--to", str(tmp_path / "there" / "best")]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("stof: ") and told.err.count("\n") == 1


def test_an_answer(capsys, monkeypatch):
    """`stof mask … > /dev/full`."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["mask", "causal", "64"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == "stof: [Errno 28] No space left on device\n"
