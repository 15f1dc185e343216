"""`stof bench`: the time of an engine's calls on this device, beside eager PyTorch with the same masks."""

from pathlib import Path

from stof_tvm.cli.command import UsageError, new_command, positive, print_answer, show_progress
from stof_tvm.cli.measuring.lengths import lengths
from stof_tvm.cli.measuring.other_load import OtherLoad
from stof_tvm.cli.measuring.ratio import ratio_of, ratio_text
from stof_tvm.cli.named.models import NAMED, add_model_arguments, load_call
from tir_kernels.errors import UnsupportedError


def add_command(commands) -> None:
    bench = new_command(
        commands,
        "bench",
        _bench,
        "time the calls of an engine, beside eager PyTorch where the model is there",
        "stof bench my_models:encoder --repeats 20",
        "Calls are warmed up and interleaved; on a GPU device events time them. An engine whose results are not "
        "PyTorch's is not timed: exits with 1. With --lengths, an engine of a range of lengths is timed at some.",
    )
    add_model_arguments(bench, "source", f"a saved engine, or {NAMED}")
    bench.add_argument("--repeats", type=positive, default=30, help="timed calls of each (default: %(default)s)")
    bench.add_argument(
        "--lengths",
        type=lengths,
        metavar="LEAST:MOST[:COUNT]",
        help="build for a range of lengths (the second dimension; or load a saved range) and time 10 or COUNT random "
        "ones; or A,B,C: these",
    )
    bench.add_argument("--lazy", action="store_true", help="compile each length at its first call")


def _bench(arguments) -> None:
    import torch

    from stof_tvm.cli.measuring.timing import device_name, first_call, time_calls

    if arguments.lengths is not None:
        return _bench_lengths(arguments)
    if arguments.lazy:
        raise UsageError("--lazy is for --lengths")
    if _is_saved(arguments.source):
        engine, calls, note = _saved_engine(arguments)
    else:
        engine, calls, note = _model(arguments)
    device = engine.device_type
    first_ms = {name: first_call(call, device)[1] for name, call in calls.items()}
    with OtherLoad() as load:
        rows = time_calls(calls, device, arguments.repeats, show_progress())
    busy = load.note(torch.get_num_threads())
    found = {
        "device": device_name(device),
        "verification": engine.report().to_dict()["verification"],
        "note": note,
        "busy": busy,
        "ratio": ratio_of(rows[0], rows[1], busy) if len(rows) == 2 else None,
        "systems": [{**row, "first_ms": first_ms[row["system"]]} for row in rows],
    }
    print_answer(arguments, found, _text(found))


def _bench_lengths(arguments) -> None:
    import torch

    from stof_tvm.cli.measuring.range_times import text, time_lengths, time_saved
    from stof_tvm.cli.measuring.timing import device_name

    if _is_saved(arguments.source):
        engine = _saved_range(arguments)
        with OtherLoad() as load:
            found = time_saved(engine, arguments.lengths, arguments.repeats)
    else:
        model, inputs, mask = load_call(arguments.source, arguments)
        with OtherLoad() as load:
            found = time_lengths(
                model, inputs, mask, arguments.lengths, arguments.lazy, arguments.target, arguments.repeats
            )
    busy = load.note(torch.get_num_threads())
    for row in found["lengths"]:
        if row["ratio"] and busy:
            row["ratio"]["is_sure"] = False
    found = {"device": device_name(found.pop("device_type")), **found, "busy": busy}
    notes = [note for note in (found["note"], found["busy"]) if note is not None]
    print_answer(arguments, found, "\n".join([*text(found), *notes]))


def _is_saved(source: str) -> bool:
    return source.endswith(".stof") or Path(source).is_file() and not source.endswith(".py")


def _refuse_own(arguments) -> None:
    if arguments.mask or arguments.target:
        raise UsageError("--mask and --target are for models; a saved engine has its own")


def _saved_range(arguments):
    """The engine in the file of a range."""
    from stof_tvm.saving.loading import load
    from stof_tvm.saving.range_file import is_range_file

    _refuse_own(arguments)
    if arguments.lazy:
        raise UsageError("--lazy is for models: a saved engine is compiled")
    path = Path(arguments.source)
    if path.is_file() and not is_range_file(path):
        raise UsageError(f"--lengths is for models and saved ranges: {path} holds an engine of one shape")
    return load(path)


def _saved_engine(arguments) -> tuple:
    """(the engine, its call on random inputs by system, None in place of a note)."""
    from stof_tvm.cli.measuring.timing import random_inputs
    from stof_tvm.saving.loading import load
    from stof_tvm.saving.range_file import is_range_file

    _refuse_own(arguments)
    if is_range_file(arguments.source):
        raise UsageError(
            f"{arguments.source} holds an engine for a range of shapes: --lengths A,B,C tells which to time"
        )
    engine = load(Path(arguments.source))
    args, kwargs = random_inputs(engine.signature, engine.device_type)
    return engine, {"stof": lambda: engine(*args, **kwargs)}, None


def _model(arguments) -> tuple:
    """(the engine, which `build` has compared with PyTorch, calls by system, a note if there is no eager call)."""
    import torch

    from stof_tvm.compiler import build
    from stof_tvm.verification.reference import reference_of

    model, inputs, mask = load_call(arguments.source, arguments)
    engine = build(model, arguments.target, inputs, mask, progress=show_progress())
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    calls = {"stof": lambda: engine(*args, **kwargs)}
    if mask is None and isinstance(model, torch.nn.Module):
        eager = model.eval()
    else:
        try:
            reference = reference_of(model, args, kwargs, report=engine.report(), mask=mask)
        except UnsupportedError as error:
            return engine, calls, f"eager PyTorch is not timed: {error}"
        eager, args_of_graph = reference.graph, reference.arguments(args, kwargs)

    def eager_call():
        with torch.no_grad():
            return eager(*args, **kwargs) if eager is model else eager(*args_of_graph)

    return engine, {**calls, "eager": eager_call}, None


def _text(found: dict) -> str:
    rows = found["systems"]
    lines = [f"{found['device']}; milliseconds a call", "         first   median  quartiles"]
    for row in rows:
        low, high = row["quartiles_ms"]
        lines.append(f"{row['system']:<6}{row['first_ms']:8.2f} {row['median_ms']:8.3f}  {low:.3f} … {high:.3f}")
    if found["ratio"]:
        lines.append(f"eager / stof: {ratio_text(found['ratio'])}")
    if found["verification"]:
        lines.append(f"compared with PyTorch: {found['verification']['result']}, {found['verification']['detail']}")
    return "\n".join([*lines, *(found[name] for name in ("note", "busy") if found[name])])
