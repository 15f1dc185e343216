"""`stof tune`: search the fusion scheme and kernel parameters of a model."""

import contextlib
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

from stof_tvm.cli.command import (
    new_command,
    picture_file,
    positive,
    positive_seconds,
    print_answer,
    show_progress,
    use_no_display,
)
from stof_tvm.cli.named.models import add_model_arguments, load_call

REPORT = "tuning_report.html"
PATIENCE_SECONDS = 1.5


def add_command(commands) -> None:
    tune = new_command(
        commands,
        "tune",
        _tune,
        "search fusion scheme and kernel parameters of a model, into a log that build replays",
        "stof tune my_models:encoder --seconds 60",
        "Interrupt it at any time: it goes on where it was.",
    )
    add_model_arguments(tune)
    tune.add_argument(
        "--tuning-logs",
        "--work-dir",
        dest="tuning_logs",
        metavar="FOLDER",
        default="tuning_logs",
        help="folder of the logs (default: %(default)s)",
    )
    tune.add_argument("--max-trials", type=positive, default=256, help="candidates at most (default: %(default)s)")
    tune.add_argument("--seconds", type=positive_seconds, help="time limit")
    tune.add_argument("--seed", type=int, default=0)
    tune.add_argument("--picture", type=picture_file, metavar="FILE", help="draw the search into a .png or .svg file")
    tune.add_argument("--rpc-tracker", metavar="HOST:PORT", help="measure on devices of this TVM RPC tracker")
    tune.add_argument("--rpc-key", metavar="KEY", help="key of these devices")


def _tune(arguments) -> None:
    from stof_tvm.tuning.tune import tune

    model, inputs, mask = load_call(arguments.model, arguments)
    with ending_in_time() as interrupts:
        result = _result(tune, arguments, model, inputs, mask)
    page = Path(arguments.tuning_logs) / REPORT
    page.parent.mkdir(parents=True, exist_ok=True)
    result.report.write(page)
    best = result.best
    default = f"{best['default_us']:.1f} µs by default"
    found = (
        f"{default}; it ended before all kernels had a time"
        if best["us"] is None
        else f"{best['us']:.1f} µs, {default}"
    )
    print_answer(
        arguments,
        {**result.report.to_dict(), "interrupted": result.is_interrupted, "report": str(page)},
        f"{found}; scheme {best['scheme']}; {_failures(result.history)}; report: {page}",
    )
    if arguments.picture:  # last, so that an error in writing the picture hides no result
        _draw(result.report, arguments.picture)
    if interrupts:
        _leave(0)


def _failures(history) -> str:
    """How many trials failed, and most often why."""
    reasons = Counter(trial.reason for trial in history if trial.us is None)
    if not reasons:
        return f"none of {len(history)} trials failed"
    ((reason, count),) = reasons.most_common(1)
    return f"{reasons.total()} of {len(history)} trials failed ({count}× {reason})"


def _result(tune, arguments, model, inputs, mask):
    return tune(
        model,
        arguments.target,
        inputs,
        mask,
        work_dir=arguments.tuning_logs,
        max_trials=arguments.max_trials,
        max_seconds=arguments.seconds,
        seed=arguments.seed,
        progress=show_progress(),
        rpc_tracker=arguments.rpc_tracker,
        rpc_key=arguments.rpc_key,
    )


@contextlib.contextmanager
def ending_in_time():
    """A context in which the process ends soon after Ctrl-C, even if code hangs: the log has what was measured.

    Yields a list that stays empty until Ctrl-C.
    """

    def interrupted(_number, _frame):
        if not timers:
            timers.append(threading.Timer(PATIENCE_SECONDS, _give_up))
            timers[0].daemon = True
            timers[0].start()
        raise KeyboardInterrupt

    timers: list[threading.Timer] = []
    if threading.current_thread() is not threading.main_thread():
        yield timers
        return
    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield timers
    except (Exception, KeyboardInterrupt):
        if timers:  # Python code that TVM calls turns Ctrl-C into TVM's error
            _give_up()
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        for timer in timers:
            timer.cancel()


def _give_up() -> None:
    print("stof: interrupted", file=sys.stderr, flush=True)
    _leave(130)


def _leave(status: int) -> None:
    """End without Python's teardown, which may crash after an interrupt within TVM's or LLVM's code."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _draw(report, path: Path) -> None:
    from stof_tvm import pictures

    use_no_display()
    pictures.save(pictures.tuning_curves({"search": report.curve()}, f"{report.gpu}, {report.target}"), path)
