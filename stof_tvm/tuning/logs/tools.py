"""Tools for tuning logs: list them, check that they still fit, reduce them to the best records."""

import multiprocessing
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from stof_tvm.saving.whole_file import write_whole
from stof_tvm.tuning.logs.log import FAILURES, README, RECORDS, SCHEMES, TuningLog
from stof_tvm.tuning.logs.record import Record
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.compile import cuda_source
from tir_kernels.errors import InputError, TuningLogError
from tir_kernels.pipelines import pipeline_of
from tir_kernels.problems.registry import kind_of
from tir_kernels.target import parse_target
from tir_kernels.tuning.decisions import TRACE, decisions_key
from tir_kernels.tuning.template_space import completed, from_decisions, misfit
from tir_kernels.tuning.workload import problem_of


def open_logs(folder) -> list[TuningLog]:
    """The logs of all architectures in a folder; TuningLogError where there are none."""
    folder = Path(folder)
    inside = folder.iterdir() if folder.is_dir() else []
    names = sorted(path.name for path in inside if not path.name.startswith(".") and _is_log(path))
    if not names:
        what = "holds no tuning logs: a folder for each architecture" if folder.is_dir() else "is no folder"
        raise TuningLogError(f"{folder} {what}")
    return [TuningLog(folder, _target_of(name)) for name in names]


def _is_log(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RECORDS, FAILURES, SCHEMES))


def list_log(log: TuningLog) -> list[dict]:
    """A row for each workload: what it is, how often it was tried, the fastest trial.

    `choice` is that trial's decisions as text: "128x64x64 2x2 warps 3 stages", or the digest of a trace.
    """
    rows = []
    for key, workload in log.workloads():
        records, best = log.records(key), log.best(key)
        rows.append(
            {
                "arch": log.folder.name,
                "workload": key,
                "name": _name(workload),
                "problem": _describe(workload),
                "trials": len(records),
                "failed": sum(not record.valid for record in records),
                "best_us": None if best is None else best.us,
                "decisions": None if best is None else best.decisions,
                "choice": None if best is None else _choice(best.decisions),
                "gpu": None if best is None else best.gpu,
            }
        )
    return rows


def _choice(decisions: dict) -> str:
    try:
        _, config = from_decisions(decisions)
    except InputError:
        config = None
    return getattr(config, "label", None) or str(decisions.get(TRACE, decisions))


def verify_log(log: TuningLog, jobs: int = 1) -> list[dict]:
    """A row for each timed record whose kernel cannot be built any more: its location and why.

    Every configuration is instantiated and lowered to source; every other trace is applied to its workload.  `jobs`
    processes share the work.
    """
    if jobs == 1:
        return _verify_share(log, 0, 1)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        shares = [pool.submit(_verify_in_process, log.folder, number, jobs) for number in range(jobs)]
        return [row for share in shares for row in share.result()]


def _verify_in_process(folder: Path, number: int, jobs: int) -> list[dict]:
    return _verify_share(TuningLog(folder.parent, _target_of(folder.name)), number, jobs)


def _verify_share(log: TuningLog, number: int, jobs: int) -> list[dict]:
    """`verify_log` of every `jobs`-th record, from the one at `number` on."""
    trials = [(key, workload, record) for key, workload in log.workloads() for record in log.ranked(key)]
    rows = []
    for key, workload, record in trials[number::jobs]:
        reason = _misfit(workload, record, log.target)
        if reason is not None:
            rows.append({"arch": log.folder.name, "workload": key, "location": record.location, "reason": reason})
    return rows


def copy_best(sources: list[Path], destination: Path, records: int = 1) -> int:
    """Write the fastest trial of each workload and GPU, and the best schemes, of several folders to a new one.

    With `records` above 1 it writes that many of each, spread evenly from the fastest to the slowest, for a cost model
    to learn from.  Returns how many were written.  Raises TuningLogError for a destination that is not empty.
    """
    if destination.exists() and not destination.is_dir():
        raise TuningLogError(f"{destination} is no folder")
    if destination.exists() and any(destination.iterdir()):
        raise TuningLogError(f"{destination} is not empty")
    merged, written = {}, 0
    logs = [log for source in sources for log in open_logs(source)]
    for log in logs:
        copy = merged.setdefault(log.folder.name, TuningLog(destination, log.target))
        for key, scheme in ((key, scheme) for key, schemes in log.schemes.items() for scheme in schemes):
            known = copy.scheme(key, scheme.gpu)
            if known is None or known.gpu != scheme.gpu or scheme.us < known.us:
                copy.save_scheme(key, scheme.scheme, scheme.us, scheme.gpu, scheme.date)
    for name, copy in merged.items():
        written += sum(_copy_trials([log for log in logs if log.folder.name == name], copy, records))
        texts = [(log.folder / README).read_text(errors="replace") for log in logs if (log.folder / README).exists()]
        if copy.folder.is_dir():
            try:
                write_whole(copy.folder / README, "\n".join(dict.fromkeys(texts)))
            except OSError as error:
                raise TuningLogError(f"{copy.folder} cannot be written: {error}") from error
    return written


def _copy_trials(logs: list[TuningLog], copy: TuningLog, records: int) -> Iterator[int]:
    workloads = {key: workload for log in logs for key, workload in log.workloads()}
    for key, workload in workloads.items():
        by_gpu = {}  # the fastest trial of each choice, the fastest first
        timed = [(record.us, record) for log in logs for record in log.ranked(key) if record.us is not None]
        for us, record in sorted(timed, key=lambda trial: trial[0]):
            by_gpu.setdefault(record.gpu, {}).setdefault(decisions_key(completed(record.decisions)), (us, record))
        for gpu, trials in by_gpu.items():
            kept = _spread(list(trials.values()), records)
            for us, record in kept:
                copy.add(workload, _trace(workload, record), us, gpu)
            yield len(kept)


def _spread(records: list, count: int) -> list:
    """The first, and others at even distances up to the last."""
    if len(records) <= count or count == 1:
        return records[:count]
    return [records[i * (len(records) - 1) // (count - 1)] for i in range(count)]


def _trace(workload, record: Record) -> Trace:
    sch = Schedule(workload, debug_mask="none")
    Trace.apply_json_to_schedule(record.trace, sch)
    return sch.trace


def _misfit(workload: tvm.IRModule, record: Record, target) -> str | None:
    try:
        problem = problem_of(workload)
        if problem is None:
            with quick_script():
                _trace(workload, record)
            return None
        template, config = from_decisions(record.decisions)
        reason = misfit(template, problem, config, target)
        if reason is None:
            _build_source(template, problem, config, target)
        return reason
    except InputError as error:
        return str(error)
    except Exception as error:  # TVM may raise anything for code that it cannot build
        return str(error).strip().splitlines()[-1]


def _build_source(template, problem, config, target) -> None:
    with quick_script():
        function = template.instantiate(problem, config, target).with_attr("global_symbol", "main")
    with target:
        executable = tvm.compile(tvm.IRModule({"main": function}), target=target, tir_pipeline=pipeline_of(target))
    if target.kind.name == "cuda":
        cuda_source(executable)


def _target_of(name: str) -> tvm.target.Target:
    """The target of a folder's name."""
    kind, _, cpu = name.partition("-")
    return parse_target({"kind": "llvm", "mcpu": cpu} if kind == "llvm" else f"cuda -arch={name}")


def _name(workload: tvm.IRModule) -> str:
    problem = problem_of(workload)
    return textwrap.shorten(_describe(workload), 48) if problem is None else kind_of(problem).title(problem)


def _describe(workload: tvm.IRModule) -> str:
    problem = problem_of(workload)
    if problem is not None:
        return str(problem)
    arguments = ms.arg_info.ArgInfo.from_entry_func(workload)
    return "function of " + ", ".join(f"{x.dtype}{list(map(int, x.shape))}" for x in arguments)
