"""`stof tune`: search the fusion scheme and kernel parameters of a model, from the command line."""

import importlib
import json
import os
import sys
from pathlib import Path

from tir_kernels.errors import InputError

REPORT = "tuning_report.html"


def add_tune_command(commands) -> None:
    """Add the command to those of the parser."""
    tune = commands.add_parser(
        "tune",
        help="search fusion scheme and kernel parameters of a model, into a log that build replays",
        description="Search the fusion scheme and kernel parameters of a model, into a log that build replays. "
        "Interrupt it at any time: it goes on where it was.",
        epilog='example: stof tune demo --target "cuda -arch=sm_90a" --seconds 60',
    )
    tune.add_argument(
        "model",
        help="module:function that returns (model, example_inputs) or (model, example_inputs, mask); or 'demo'",
    )
    tune.add_argument("--target", help="compilation target; default: the GPU present, else LLVM")
    tune.add_argument("--work-dir", default="tuning_logs", help="folder of the logs (default: %(default)s)")
    tune.add_argument("--max-trials", type=int, default=256, help="candidates at most (default: %(default)s)")
    tune.add_argument("--seconds", type=float, help="time limit")
    tune.add_argument("--seed", type=int, default=0)
    tune.add_argument("--rpc-tracker", metavar="HOST:PORT", help="measure on devices of this TVM RPC tracker")
    tune.add_argument("--rpc-key", metavar="KEY", help="key of these devices")
    tune.add_argument("--json", action="store_true", help="print one JSON object instead of text, no progress bar")
    tune.set_defaults(run=_tune)


def _tune(arguments) -> None:
    from stof_tvm.tuning.tune import tune

    model, inputs, mask = load_model(arguments.model, arguments.target)
    result = tune(
        model,
        arguments.target,
        inputs,
        mask,
        work_dir=arguments.work_dir,
        max_trials=arguments.max_trials,
        max_seconds=arguments.seconds,
        seed=arguments.seed,
        progress=not arguments.json,
        rpc_tracker=arguments.rpc_tracker,
        rpc_key=arguments.rpc_key,
    )
    page = Path(arguments.work_dir) / REPORT
    result.report.write(page)
    if arguments.json:
        print(json.dumps({**result.report.to_dict(), "interrupted": result.is_interrupted, "report": str(page)}))
    else:
        best = result.best
        print(f"{best['us']:.1f} µs, {best['default_us']:.1f} µs by default; scheme {best['scheme']}; report: {page}")


def load_model(name: str, target=None) -> tuple:
    """(model, example inputs, mask or None) of "module:function" or a built-in name.

    Raises InputError for what is not there or returns something else.
    """
    if name == "demo":
        from stof_tvm.demo import demo_call

        return demo_call(target)
    module, colon, function = name.partition(":")
    if not colon:
        raise InputError(f"model {name!r} is neither 'demo' nor module:function")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise InputError(f"model {name!r} cannot be loaded: {error}") from None
    finally:
        sys.path.pop(0)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise InputError(f"{name} must return (model, example_inputs) or (model, example_inputs, mask)")
    return (*made, None)[:3]
