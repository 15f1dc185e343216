"""The short form of the fuzzer, and that it finds what there is to find."""

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from tests.robustness.fuzz import run as fuzz
from tests.robustness.fuzz.targets import TARGETS, Found

INPUTS, SEED = 1500, 20261121


def test_nothing_is_found(tmp_path):
    summary = fuzz.run(TARGETS, INPUTS, SEED, tmp_path)
    assert not summary.findings, f"seed {SEED}; inputs are in {tmp_path}"
    assert sum(summary.counts.values()) == INPUTS
    for target in TARGETS:
        assert summary.counts[target.name, "read"] and summary.counts[target.name, "refused"], target.name


def test_a_seed_makes_the_same_inputs():
    for number in range(50):
        (one, files), (other, again) = (fuzz.make_input(TARGETS, 3, number) for _ in range(2))
        assert one is other and files == again
    assert fuzz.make_input(TARGETS[:1], 3, 1)[1] != fuzz.make_input(TARGETS[:1], 4, 1)[1]


@dataclass(frozen=True)
class Digits:
    """Reads numbers; does `wrong` at 7."""

    wrong: Callable
    name: str = "digits"
    weight: int = 1

    def make(self, rng: Random) -> dict[str, bytes]:
        return {"number": b"%d" % rng.randrange(10)}

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        if files["number"] == b"7":
            self.wrong()
        return "read"


def leak():
    raise KeyError("x")


def accept():
    raise Found("a wrong result")


def crash():
    faulthandler.disable()  # the crash is meant
    os.kill(os.getpid(), signal.SIGSEGV)


def hang():
    time.sleep(60)


@pytest.mark.parametrize(
    ("wrong", "what"), [(leak, "KeyError"), (accept, "a wrong result"), (crash, "signal 11"), (hang, "Hangs")]
)
def test_what_goes_wrong_is_found_and_saved(wrong, what, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    target, inputs = Digits(wrong), 12
    sevens = [n for n in range(inputs) if fuzz.make_input([target], 5, n)[1]["number"] == b"7"]
    assert sevens
    summary = fuzz.run([target], inputs, 5, tmp_path)
    assert [number for number, *_ in summary.findings] == sevens
    assert all(what in text for *_, text in summary.findings)
    for number in sevens:
        folder = tmp_path / f"digits-5-{number}"
        assert (folder / "number").read_bytes() == b"7" and what in (folder / "finding.txt").read_text()
    assert fuzz.run([replace(target, wrong=lambda: None)], inputs, 5).counts["digits", "read"] == inputs
