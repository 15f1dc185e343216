"""`stof bench`: what a call of an engine takes on this device, beside eager PyTorch with the same mask."""

import contextlib
from pathlib import Path

from stof_tvm.cli.command import new_command, positive, print_answer, show_progress
from stof_tvm.cli.models import NAMED, add_model_arguments, load_call
from tir_kernels.errors import InputError

NOT_MASKED = "eager PyTorch runs without the mask: the mask is given by module path, or an attention is not SDPA"


def add_command(commands) -> None:
    bench = new_command(
        commands,
        "bench",
        _bench,
        "time the calls of an engine, beside eager PyTorch where the model is there",
        "stof bench my_models:encoder --repeats 20",
        "Calls are warmed up and interleaved; on a GPU device events time them. Exits with 1 where the engine's "
        "results are not PyTorch's.",
    )
    add_model_arguments(bench, "source", f"a saved engine, or {NAMED}")
    bench.add_argument("--repeats", type=positive, default=30, help="timed calls of each (default: %(default)s)")


def _bench(arguments) -> int:
    from stof_tvm.cli.timing import device_name, first_call, time_calls

    if arguments.source.endswith(".stof") or Path(arguments.source).is_file():
        engine, calls, compared = _saved_engine(arguments)
    else:
        engine, calls, compared = _model(arguments)
    device = engine.device_type
    first = {name: first_call(call, device) for name, call in calls.items()}
    checked = compared(*(result for result, _ in first.values())) if compared else {}
    found = {"device": device_name(device), **checked, "systems": []}
    if checked.get("matches") is False:
        print_answer(arguments, found, f"not timed, because the results are wrong: {_check_text(checked)}")
        return 1
    rows = time_calls(calls, device, arguments.repeats, show_progress())
    found["systems"] = [{**row, "first_ms": first[row["system"]][1]} for row in rows]
    print_answer(arguments, found, _text(found))
    return 0


def _saved_engine(arguments) -> tuple:
    """The engine, and calls of it on random inputs, which nothing compares."""
    from stof_tvm.cli.timing import random_inputs
    from stof_tvm.engine import load

    if arguments.mask or arguments.target:
        raise InputError("--mask and --target are for models; a saved engine has its own")
    engine = load(Path(arguments.source))
    args, kwargs = random_inputs(engine.signature, engine.device_type)
    return engine, {"stof": lambda: engine(*args, **kwargs)}, None


def _model(arguments) -> tuple:
    """The engine, the calls by system, and what compares their results."""
    import torch

    from stof_tvm.cli.eager import MaskedSdpa, compare
    from stof_tvm.compiler import build
    from stof_tvm.masks import Mask

    model, inputs, mask = load_call(arguments.source, arguments)
    engine = build(model, arguments.target, inputs, mask, progress=show_progress())
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    sdpa = MaskedSdpa(mask) if isinstance(mask, Mask) else contextlib.nullcontext()

    def eager():
        with torch.no_grad(), sdpa:
            return model(*args, **kwargs)

    def compared(ours, theirs) -> dict:
        # One call has been made: were all attentions masked?
        if mask is not None and getattr(sdpa, "calls", 0) != len(engine.report().sites):
            return {"matches": None, "error": None, "largest": None, "note": NOT_MASKED}
        return {**compare(ours, theirs), "note": None}

    return engine, {"stof": lambda: engine(*args, **kwargs), "eager": eager}, compared


def _text(found: dict) -> str:
    rows = found["systems"]
    lines = [f"{found['device']}; milliseconds a call", "         first   median  quartiles"]
    for row in rows:
        low, high = row["quartiles_ms"]
        lines.append(f"{row['system']:<6}{row['first_ms']:8.2f} {row['median_ms']:8.3f}  {low:.3f} … {high:.3f}")
    if len(rows) == 2:
        lines.append(f"eager / stof: {rows[1]['median_ms'] / rows[0]['median_ms']:.2f}")
        lines.append(_check_text(found))
    return "\n".join(lines)


def _check_text(checked: dict) -> str:
    if checked["note"]:
        return f"results not compared, {checked['note']}"
    if checked["error"] is None:
        return "results are not finite"
    return f"largest difference {checked['error']:.1e}, largest value {checked['largest']:.1e}"
