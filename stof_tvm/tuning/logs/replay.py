"""The choice of the tuning log that `build` replays."""

from collections.abc import Iterable
from pathlib import Path

import tvm

import stof_tvm
from relax_passes.tuned_choices import TunedChoices
from stof_tvm.tuning.logs.log import TuningLog, arch_name
from tir_kernels.errors import InputError, TuningLogError
from tir_kernels.target import local_gpu_name

FOLDER = "tuning_logs"


def tuned_choices(tuning_logs, target: tvm.target.Target, templates: Iterable = ()) -> TunedChoices | None:
    """The records for a target in a folder of logs, or None where there is nothing to replay.

    Parameters
    ----------
    tuning_logs : path, False or None
        None is "tuning_logs" in the working directory, else the logs that came with this package, where either has any
        for the target's architecture.  False replays nothing.
    templates : iterable
        The user's own templates, which records may name.

    Raises TuningLogError for a folder that does not exist or a damaged log.
    """
    if tuning_logs is False:
        return None
    if tuning_logs is not None:
        folders = [_given(tuning_logs)]
    else:
        folders = [path for path in default_folders() if (path / arch_name(target)).is_dir()]
    if not folders:
        return None
    gpu = local_gpu_name() if target.kind.name == "cuda" else None
    return TunedChoices(TuningLog(folders[0], target), target, gpu, templates)


def default_folders() -> list[Path]:
    """Where logs are looked for: in the working directory, then beside the package."""
    return [Path(FOLDER), Path(stof_tvm.__file__).parent.parent / FOLDER]


def replay_lines(tuned: TunedChoices | None) -> tuple[str, ...]:
    """What the report says of a replay: scheme and schedules, then the records that were skipped, a line each."""
    if tuned is None:
        return ()
    record = tuned.scheme_in_use
    scheme = "no record" if record is None else f"{record.us:.1f} µs on {record.gpu}, {record.date}"
    log = f"log {arch_name(tuned.target)}; fusion scheme: {scheme}; other functions with a schedule: {tuned.scheduled}"
    return log, *(f"skipped: {note}" for note in tuned.notes)


def _given(tuning_logs) -> Path:
    if not isinstance(tuning_logs, str | Path):
        raise InputError(f"tuning_logs is a path, None or False, got {tuning_logs!r}")
    folder = Path(tuning_logs)
    if not folder.is_dir():
        raise TuningLogError(f"tuning_logs={str(folder)!r} is no folder")
    return folder
