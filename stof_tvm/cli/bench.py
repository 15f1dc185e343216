"""`stof bench`: what a call of an engine takes on this device, beside eager PyTorch with the same mask."""

from pathlib import Path

from stof_tvm.cli.command import new_command, positive, print_answer, show_progress
from stof_tvm.cli.models import NAMED, add_model_arguments, load_call
from tir_kernels.errors import InputError


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
    if arguments.source.endswith(".stof"):
        if arguments.mask or arguments.target:
            raise InputError("--mask and --target are of a model; a saved engine has its own")
        calls, checked = _saved_engine(Path(arguments.source)), {}
    else:
        calls, checked = _model(arguments)
    if checked and not checked["matches"]:
        print_answer(arguments, checked, f"not timed: the results are wrong.\n{_check_text(checked)}")
        return 1
    from stof_tvm.cli.timing import device_name, time_calls

    rows = time_calls(calls, arguments.repeats, show_progress())
    found = {"device": device_name(), "systems": rows, **checked}
    print_answer(arguments, found, _text(found))
    return 0


def _saved_engine(path: Path) -> dict:
    """The engine on random inputs."""
    from stof_tvm.artifact import load_artifact
    from stof_tvm.cli.timing import random_inputs
    from stof_tvm.engine import load
    from stof_tvm.frontend.signature import Signature

    engine = load(path)
    artifact = load_artifact(path)
    args, kwargs = random_inputs(Signature.from_json(artifact.signature), artifact.manifest["device"])
    return {"stof": lambda: engine(*args, **kwargs)}


def _model(arguments) -> tuple[dict, dict]:
    """The calls by system, and how far the engine's results are from PyTorch's."""
    import torch

    from stof_tvm.cli.eager import compare, masked_sdpa
    from stof_tvm.compiler import build

    model, inputs, mask = load_call(arguments.source, arguments)
    engine = build(model, arguments.target, inputs, mask, progress=show_progress())
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    args = (args,) if isinstance(args, torch.Tensor) else args

    def eager():
        with torch.no_grad(), masked_sdpa(mask) as attentions:
            return model(*args, **kwargs), attentions

    calls = {"stof": lambda: engine(*args, **kwargs), "eager": lambda: eager()[0]}
    sites = len(engine.report().sites)
    expected, attentions = eager()
    if mask is not None and len(attentions) != sites:
        note = "PyTorch's own calls have no mask here: it is given by path, or attention is not written as SDPA"
        return calls, {"matches": True, "error": None, "largest": None, "note": note}
    return calls, {**compare(engine(*args, **kwargs), expected), "note": None}


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
        return f"not compared: {checked['note']}"
    return f"largest difference {checked['error']:.1e}, largest value {checked['largest']:.1e}"
