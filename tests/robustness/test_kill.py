"""kill -9 at random moments: nothing is lost but what was under way.

`make fuzz` kills each 50 times.
"""

import hashlib
import itertools
import json
import warnings
from pathlib import Path
from random import Random
from unittest import mock

from stof_tvm.saving.artifact import load_artifact, save_artifact
from stof_tvm.saving.whole_file import write_whole
from stof_tvm.tuning.logs.log import TuningLog
from stof_tvm.tuning.measuring.measure import Measurer
from stof_tvm.tuning.search.state import Options, Search
from stof_tvm.tuning.tune import run_search
from tests.robustness.conftest import count
from tests.robustness.fuzz import bases
from tests.robustness.processes import kill_at_random
from tests.stof_tvm.tuning.fakes import CUDA, FakeBuilder, FakeRunner
from tests.stof_tvm.tuning.logged import GPU, OTHER, TARGET, WORKLOAD, trace

KILLS = count(3, 50)


def records_of(folder, target) -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a line that is not whole
        log = TuningLog(folder, target)
    return [record for key in log.keys for record in log.records(key)]


def test_adding_records(tmp_path):
    rng, added = Random(1), 0
    choices = [trace(0), trace(1), trace(2), trace(0, OTHER)]

    def add_for_ever(tell):
        log = TuningLog(tmp_path, TARGET)
        for number in itertools.count():
            which = number % 4
            outcome = "it hung" if number % 5 == 0 else 1.0 + number
            log.add(OTHER if which == 3 else WORKLOAD, choices[which], outcome, GPU)
            if number % 7 == 0:
                log.save_scheme(f"graph {number % 3}", "0x4f", 1e6 / (1 + number), GPU)
            tell()

    for _ in range(KILLS):
        told = kill_at_random(add_for_ever, rng, 0.1, least_told=1)
        found = len(records_of(tmp_path, TARGET))
        assert added + told <= found <= added + told + 1
        added = found
    assert len(TuningLog(tmp_path, TARGET).schemes) >= 1


def test_searching(gpu_tasks, tmp_path):
    """The search goes on from what it knew; one that has measured all there is, in the next log."""
    rng, known = Random(2), 0

    def search(folder, tell):
        log = TuningLog(folder, CUDA)
        add = log.add

        def add_and_tell(*trial):
            record = add(*trial)
            tell()
            return record

        log.add = add_and_tell
        measurer = Measurer(FakeBuilder(), FakeRunner(), log, "cuda", "a fake", 2)
        run_search(Search(log, measurer, Options(cost_model=False), 0, 10_000), gpu_tasks, None)

    def search_for_ever(tell):
        for number in itertools.count():
            search(tmp_path / str(number), tell)

    for number in range(KILLS):
        told = kill_at_random(search_for_ever, rng, count(1, 4), least_told=0 if number else 1)
        found = sum(len(records_of(folder, CUDA)) for folder in tmp_path.iterdir())
        assert known + told <= found
        known = found
    assert known > 0


def saved_bytes(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() * 30_000  # a megabyte


def test_saving_engines(tmp_path):
    """The old engine or the new one, never something between."""
    path, rng = tmp_path / "engine.stof", Random(3)

    def save(number: int) -> None:
        save_artifact(
            path,
            target=bases.HOST,
            device="cpu",
            masks=[],
            memory=[number],
            weights=bases.WEIGHTS,
            signature=json.dumps(bases.SIGNATURE),
            report=bases.REPORT,
            export_library=lambda library: Path(library).write_bytes(saved_bytes(number)),
        )

    def save_for_ever(tell):
        for number in itertools.count(1):
            save(number)
            tell()

    save(0)
    for _ in range(KILLS):
        kill_at_random(save_for_ever, rng, 0.1)
        with mock.patch("stof_tvm.saving.artifact.load_library", lambda library: Path(library).read_bytes()):
            artifact = load_artifact(path)
        assert artifact.library == saved_bytes(artifact.manifest["memory"][0])


def test_replacing_files(tmp_path):
    path, rng = tmp_path / "page.html", Random(4)

    def write_for_ever(tell):
        for number in itertools.count():
            write_whole(path, f"{number}\n" * 100_000)
            tell()

    write_whole(path, "0\n")
    for _ in range(KILLS):
        kill_at_random(write_for_ever, rng, 0.05)
        text = path.read_text()
        assert text.endswith("\n") and len(set(text.split())) == 1
