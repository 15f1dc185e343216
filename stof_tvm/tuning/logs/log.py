"""Tuning logs: what was measured on which GPU, as MetaSchedule's databases and a few files beside them.

    <folder>/<arch>/database_workload.json        [structural hash, module]                     a line a workload
                    database_tuning_record.json   [number of workload, [trace, [seconds], target, arguments]]
                    failures.jsonl                {"workload", "decisions", "gpu", "reason"}    a line a failed trial
                    database_checksums.json       "checksum"                    for each line of the three, in any order
                    fusion_schemes.json           key of a graph -> {"scheme", "us", "gpu", "date"}, or a list of them
                    README.md                     GPU, driver, date and command of the first record

The first two are what `tvm.s_tir.meta_schedule.database.JSONDatabase` reads.  The name of the GPU is the attribute
"model" of a record's target, which that class keeps.  Processes may add to one log at the same time.
"""

import base64
import contextlib
import datetime
import functools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from stof_tvm.saving.strict_json import read_json
from stof_tvm.saving.whole_file import write_whole
from stof_tvm.tuning.logs.line_file import Checksums, LineFile, locked
from stof_tvm.tuning.logs.record import Record, SchemeRecord, checked_decisions, checked_time, typed
from tir_kernels.errors import TuningLogError
from tir_kernels.tuning.decisions import decisions_of
from tir_kernels.tuning.workload import PROBLEM

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"
FAILURES = "failures.jsonl"
CHECKSUMS = "database_checksums.json"
SCHEMES = "fusion_schemes.json"
README = "README.md"
FAILED_SECONDS = 1e9  # MetaSchedule writes this or more for a trial that failed
TEXT = rb'"ffi\.String","data":("(?:[^"\\]|\\.)*")'  # of a module
LENGTH_BYTES = 8  # of the length before the JSON of a module


def arch_name(target: tvm.target.Target) -> str:
    """The folder of a target's logs: "sm_90a", "llvm-znver4"."""
    if target.kind.name == "cuda":
        return str(target.attrs["arch"])
    return f"{target.kind.name}-{target.attrs['mcpu']}"


def workload_hash(workload: tvm.IRModule) -> str:
    """MetaSchedule's structural hash of a workload, equal in every process."""
    return _workload_json(workload)[0]


class TuningLog:
    """The log of a target's architecture in a folder.

    Opening repairs a last line that a killed process left unfinished; other damage raises TuningLogError.

    Parameters
    ----------
    folder : path
        The folder of all architectures' logs; made at the first record.
    target : tvm.target.Target
    """

    def __init__(self, folder: str | Path, target: tvm.target.Target):
        self.folder = Path(folder) / arch_name(target)
        self.target = target
        self._checksums = Checksums(self.folder / CHECKSUMS)
        # Records name their workload by the number of its line.
        self._workloads = LineFile(self.folder / WORKLOADS, self._checksums, is_ordered=True)
        self._trials, self._failures = (LineFile(self.folder / name, self._checksums) for name in (RECORDS, FAILURES))
        self._keys = []  # hashes of the workloads, in the file's order
        self._problems = set()  # what `_problems_in` finds in the workloads
        self._records = {}  # hash of a workload -> its trials
        self._schemes = {}  # key of a graph -> GPU -> record
        self.refresh()

    # -- reading ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what other processes added."""
        if self.folder.is_dir():
            try:
                with locked(self.folder):
                    self._read_new()
            except OSError as error:
                raise TuningLogError(f"{self.folder} cannot be read: {error}") from error

    @property
    def keys(self) -> list[str]:
        """Hashes of all workloads that were tried."""
        return list(self._records)

    def records(self, workload: tvm.IRModule | str) -> list[Record]:
        """All trials of a workload, given as a module or by its hash, including failed ones."""
        return list(self._records.get(_hash(workload), ()))

    def ranked(self, workload: tvm.IRModule | str, gpu: str | None = None) -> list[Record]:
        """The trials of a workload that have a time: first those of `gpu`, then others, the fastest first."""
        valid = [record for record in self.records(workload) if record.valid]
        return sorted(valid, key=lambda record: (record.gpu != gpu, record.us))

    def may_hold(self, problem: str) -> bool:
        """Whether a workload may be of a problem, as `problem_to_json` writes it; quick, where modules take long."""
        return problem in self._problems or None in self._problems

    def best(self, workload: tvm.IRModule | str, gpu: str | None = None) -> Record | None:
        """The first of the `ranked` trials, None where no trial has a time."""
        return next(iter(self.ranked(workload, gpu)), None)

    def scheme(self, key: str, gpu: str | None = None) -> SchemeRecord | None:
        """The scheme that was found for a graph on `gpu`, else the fastest that was found on another GPU."""
        known = self._schemes.get(key, {})
        return known.get(gpu) or min(known.values(), key=lambda record: record.us, default=None)

    @property
    def schemes(self) -> dict[str, list[SchemeRecord]]:
        """The schemes of all GPUs by their graph's key."""
        return {key: list(known.values()) for key, known in self._schemes.items()}

    def workloads(self) -> Iterator[tuple[str, tvm.IRModule]]:
        """Hash and module of every workload.  Raises TuningLogError for a line that holds none."""
        lines = self._workloads.path.read_bytes().split(b"\n") if self._keys else []
        for number, (key, line) in enumerate(zip(self._keys, lines)):
            try:
                yield key, ms.database.Workload.from_json(read_json(line)).mod
            except Exception as error:  # TVM may raise anything for text that is no module
                raise self._workloads.damaged(number + 1, error) from None

    # -- writing ---------------------------------------------------------------------------------------------------

    def add(self, workload: tvm.IRModule, trace: Trace, outcome: float | str, gpu: str) -> Record:
        """Append a trial, with its microseconds or why it failed, and return it."""
        key = workload_hash(workload)
        with self._writing(gpu):
            if isinstance(outcome, str):
                failure = {"workload": key, "decisions": decisions_of(trace), "gpu": gpu, "reason": outcome}
                return self._append(self._failures, self._failure, failure)
            if key not in self._keys:
                self._workloads.append(_workload_json(workload))
                self._keys.append(key)
                self._problems |= _problems_in(_workload_json(workload)[1])
            row = [self._keys.index(key), self._record_json(workload, trace, outcome, gpu)]
            return self._append(self._trials, self._trial, row)

    def _append(self, file: LineFile, record_of, row) -> Record:
        key, record = record_of(file.lines + 1, row)  # first, so that nothing is written that cannot be read back
        file.append(row)
        self._records.setdefault(key, []).append(record)
        return record

    def save_scheme(self, key: str, scheme: str, us: float, gpu: str, date: str | None = None) -> None:
        """Keep a graph's scheme, in hexadecimal, unless one that took less time on that GPU is known.

        `date` is today if not given.
        """
        record = SchemeRecord(scheme, us, gpu, date or datetime.date.today().isoformat())
        with self._writing(gpu):
            of_gpus = self._schemes.setdefault(key, {})
            if gpu in of_gpus and of_gpus[gpu].us < us:
                return
            of_gpus[gpu] = record
            rows = {name: [vars(x) for x in known.values()] for name, known in sorted(self._schemes.items())}
            rows = {name: row if len(row) > 1 else row[0] for name, row in rows.items()}
            write_whole(self.folder / SCHEMES, json.dumps(rows, indent=1) + "\n")

    @contextlib.contextmanager
    def _writing(self, gpu: str):
        """A context that holds the lock and has read what other processes wrote; a missing README is written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder):
                self._read_new()
                self._checksums.adopt([self._workloads, self._trials, self._failures])
                if not (self.folder / README).exists():
                    write_whole(self.folder / README, _readme(self.folder.name, gpu))
                yield
        except OSError as error:
            raise TuningLogError(f"{self.folder} cannot be written: {error}") from error

    # -- lines -----------------------------------------------------------------------------------------------------

    def _read_new(self):
        for line, row in self._workloads.read_new():
            with self._workloads.expecting(line):
                key, module = typed("the line", row, list)
                self._keys.append(typed("the hash", key, str))
                self._problems |= _problems_in(typed("the module", module, str))
        for file, record_of in ((self._trials, self._trial), (self._failures, self._failure)):
            for line, row in file.read_new():
                with file.expecting(line):
                    key, record = record_of(line, row)
                self._records.setdefault(key, []).append(record)
        self._read_schemes()

    def _read_schemes(self):
        path = self.folder / SCHEMES
        try:
            found = {}
            for key, rows in read_json(path.read_bytes()).items():
                for row in rows if isinstance(rows, list) else [rows]:
                    record = SchemeRecord(**row)
                    found.setdefault(key, {})[record.gpu] = record
            self._schemes = found
        except FileNotFoundError:
            pass
        except json.JSONDecodeError as error:
            raise TuningLogError(f"{path}, line {error.lineno} is damaged: {error.msg}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise TuningLogError(f"{path} is damaged: {error}") from None

    def _trial(self, line: int, row) -> tuple[str, Record]:
        """Hash of the workload and record of a line of `RECORDS`."""
        number, (trace, seconds, target, _) = typed("the line", row, list)
        if typed("the number of the workload", number, int) not in range(len(self._keys)):
            raise ValueError(f"there is no workload {number}; there are {len(self._keys)}")
        key = self._keys[number]
        mean = sum(checked_time(x) for x in typed("the times", seconds, list)) / len(seconds)
        failed = mean >= FAILED_SECONDS
        record = Record(
            checked_decisions(decisions_of(trace)),
            None if failed else mean * 1e6,
            typed("the GPU", target.get("model", ""), str),
            "no time was measured" if failed else "",
            self._location(RECORDS, line),
            None if failed else trace,
        )
        return key, record

    def _failure(self, line: int, row) -> tuple[str, Record]:
        """Hash of the workload and record of a line of `FAILURES`."""
        key, gpu, reason = (typed(name, row[name], str) for name in ("workload", "gpu", "reason"))
        return key, Record(checked_decisions(row["decisions"]), None, gpu, reason, self._location(FAILURES, line))

    def _location(self, name: str, line: int) -> str:
        return f"{self.folder.name}/{name}:{line}"

    def _record_json(self, workload, trace, us, gpu):
        target = tvm.target.Target({**dict(self.target.export()), "model": gpu})
        known, arguments = _workload_parts(workload)
        return ms.database.TuningRecord(trace, known, [us / 1e6], target, arguments).as_json()


@functools.lru_cache(maxsize=512)
def _workload_json(workload: tvm.IRModule) -> tuple[str, str]:
    """(structural hash, serialised module), cached: they take milliseconds, and many trials share a workload."""
    key, text = ms.database.Workload(workload).as_json()
    return str(key), _compact(str(text))


@functools.lru_cache(maxsize=512)
def _workload_parts(workload: tvm.IRModule) -> tuple:
    """The parts of a trial's MetaSchedule record that come from its workload, cached for the same reason."""
    return ms.database.Workload(workload), ms.arg_info.ArgInfo.from_entry_func(workload)


def _problems_in(module: str) -> set[str | None]:
    """The texts of a serialised module of which one is its problem; None among them where that may be any."""
    try:
        data = base64.b64decode(module, validate=True)
    except ValueError:
        return {None}
    if PROBLEM.encode() not in data:
        return set()  # of a function that no template computes
    return {json.loads(text) for text in re.findall(TEXT, data) if b'\\"is\\":' in text} or {None}


def _compact(text: str) -> str:
    """A module as MetaSchedule writes it (base64 of a length and JSON), without white space: less than half of it."""
    data = base64.b64decode(text)
    compact = json.dumps(json.loads(data[LENGTH_BYTES:]), separators=(",", ":")).encode()
    return base64.b64encode(len(compact).to_bytes(LENGTH_BYTES, "little") + compact).decode()


def _hash(workload: tvm.IRModule | str) -> str:
    return workload if isinstance(workload, str) else workload_hash(workload)


def _readme(arch: str, gpu: str) -> str:
    return (
        f"# Tuning log of {arch}\n\n"
        f"Written by this project's tuner, replayed by `stof_tvm.build`; `stof logs list` shows what is in it.\n\n"
        f"- First record: {datetime.date.today().isoformat()}, on {gpu}, driver {_driver()}\n"
        f"- Command: `{shlex.join(Path(part).name if i == 0 else part for i, part in enumerate(sys.argv))}`\n"
    )


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none"
    version = re.search(r"\d+\.\d+(\.\d+)?", text)
    return version.group() if version else "unknown"
