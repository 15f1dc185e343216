"""`stof bench --lengths`: an engine of a range of lengths, timed at some of them."""

import dataclasses
import functools
import statistics
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from stof_tvm.cli.command import show_progress
from stof_tvm.cli.measuring.lengths import Lengths
from stof_tvm.cli.measuring.ratio import UNSURE, ratio_of
from stof_tvm.cli.measuring.timing import first_call, random_inputs, time_calls
from stof_tvm.frontend.padding.dims import at
from stof_tvm.frontend.shape_range import LEAST
from tir_kernels.errors import InputError, MaskError, UnsupportedError


def time_lengths(model, inputs, mask, some: Lengths, lazy: bool, target, repeats: int) -> dict:
    """Build an engine of the range and time it beside eager PyTorch at each length.

    The length is the second dimension of the first input, and of every other that has the same size there.  Inputs of
    another length are those of the example, cut or repeated.

    Returns the fields of the command's answer: `lengths` has a row for each length and system.  Raises InputError where
    the example has no such dimension, and what `build` raises.
    """
    from stof_tvm.compiler import build
    from stof_tvm.range_engine import RangeEngine

    args, kwargs, own = call_within(model, inputs, some)
    model = model.eval()
    shapes = dynamic_shapes(kwargs or args, own, some)
    options = {"dynamic_shapes": shapes, "progress": show_progress()}
    built = functools.partial(build, model, target, kwargs or args, mask, **options)
    note = None
    try:
        engine = built(lazy=lazy)
    except (UnsupportedError, MaskError) as error:  # a mask that depends on the length
        if lazy:
            raise
        note = f"each length is compiled at its first call, as with --lazy: {error}"
        engine, lazy = built(lazy=True), True
    if lazy and isinstance(engine, RangeEngine):
        engine.most_engines = max(len(some.timed), engine.most_engines)
    if mask is not None:
        told = "eager PyTorch is not timed: at other lengths than the example's it has no masks"
        note = told if note is None else f"{note}; {told}"

    def calls_at(length: int) -> dict:
        x, y = (at_length(tree, own, length) for tree in (args, kwargs))
        calls = {"stof": lambda: engine(*x, **y)}
        return calls if mask is not None else {**calls, "eager": lambda: _eager(model, x, y)}

    return _timed(engine, calls_at, some, lazy, repeats, note)


def time_saved(engine, some: Lengths, repeats: int) -> dict:
    """Time a saved engine of a range at each length, with random inputs; see `time_lengths`.

    The length is the second dimension of the inputs where it may change.  Other dimensions have their least size.
    Raises InputError where there is no such dimension, and for a length outside the range.
    """
    shapes = engine._shapes
    second = [shape[1] for shape in shapes.shapes if len(shape) > 1 and not isinstance(shape[1], int)]
    symbols = [size for size in second if size.is_Symbol]
    if not symbols:
        raise InputError(f"--lengths changes the second dimension of the inputs, and the saved range is of {shapes}")

    def calls_at(length: int) -> dict:
        sizes = {x: length if x in symbols else shapes.limits.get(x, (LEAST, None))[0] for x in shapes.symbols}
        inputs = [
            dataclasses.replace(spec, shape=tuple(at(size, sizes) for size in shape))
            for spec, shape in zip(shapes.signature.inputs, shapes.shapes)
        ]
        signature = dataclasses.replace(shapes.signature, inputs=tuple(inputs))
        args, kwargs = random_inputs(signature, engine.device_type)
        return {"stof": lambda: engine(*args, **kwargs)}

    return _timed(engine, calls_at, some, False, repeats, None)


def _timed(engine, calls_at: Callable[[int], dict], some: Lengths, lazy: bool, repeats: int, note: str | None) -> dict:
    """The fields of the command's answer; `calls_at(length)` has the calls to time by system, the engine's first."""
    device, rows = engine.device_type, []
    for length in some.timed:
        calls = calls_at(length)
        first_ms = {name: first_call(call, device)[1] for name, call in calls.items()}
        timed = time_calls(calls, device, repeats)
        for row in timed:
            p99 = percentile(row["samples_ms"])
            ratio = ratio_of(timed[0], row) if row["system"] == "eager" else None
            rows.append({"length": length, "first_ms": first_ms[row["system"]], "p99_ms": p99, "ratio": ratio, **row})
    return {
        "device_type": device,
        "mode": "lazy" if lazy else "ahead",
        "range": [some.least, some.most],
        "lengths": rows,
        "note": note,
    }


def call_within(model, inputs, some: Lengths) -> tuple[tuple, dict, int]:
    """(args, kwargs, their length) of an example call whose length is in the range.

    Raises InputError for a model that is no module, and where the example has no length.
    """
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, dict) else (_tuple(inputs), {})
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"--lengths needs a torch.nn.Module, which takes any length, got a {type(model).__name__}")
    own = _own_length((args, kwargs))
    if some.least <= own <= some.most:
        return args, kwargs, own
    args, kwargs = (at_length(tree, own, some.timed[0]) for tree in (args, kwargs))
    return args, kwargs, some.timed[0]


def dynamic_shapes(tree, own: int, some: Lengths):
    """What `build` takes for inputs whose length in the example is `own`: a tree like that of the inputs."""
    length = torch.export.Dim("length", min=some.least, max=some.most)
    return pytree.tree_map(lambda x: {1: length} if _has_length(x, own) else None, tree)


def at_length(tree, own: int, length: int):
    """The example's inputs at another length: values of the example, again from the start where there are too few."""

    def resized(x):
        if not _has_length(x, own):
            return x
        return x[:, torch.arange(length, device=x.device) % own].contiguous()

    return pytree.tree_map(resized, tree)


def percentile(samples: list[float], share: float = 0.99) -> float:
    """The number below which a share of the samples lies, between neighbours; a single sample is its own."""
    if len(samples) == 1:
        return samples[0]
    return statistics.quantiles(samples, n=100, method="inclusive")[round(share * 100) - 1]


def text(found: dict) -> list[str]:
    """Lines of the answer: a table with a row for each length, then the 99th percentile of first calls.

    Where a ratio is unsure, its place has its quartiles and a question mark.
    """
    rows = {(row["length"], row["system"]): row for row in found["lengths"]}
    has_eager = any(system == "eager" for _, system in rows)
    heading = f"length     first    median       p99{'     eager    eager / stof' if has_eager else ''}"
    low, high = found["range"]
    lines = [f"{found['device']}; milliseconds a call; {low} to {high}, {found['mode']}", heading]
    unsure = False
    for length in sorted({length for length, _ in rows}):
        row = rows[length, "stof"]
        line = f"{length:6d}{row['first_ms']:10.2f}{row['median_ms']:10.3f}{row['p99_ms']:10.3f}"
        if has_eager:
            eager = rows[length, "eager"]
            (low, high), is_sure = eager["ratio"]["quartiles"], eager["ratio"]["is_sure"]
            ratio = f"{eager['ratio']['median']:.2f}" if is_sure else f"? {low:.2f} … {high:.2f}"
            line += f"{eager['median_ms']:10.3f}{ratio:>16}"
            unsure |= not is_sure
        lines.append(line)
    if unsure:
        lines.append(f"eager / stof: ? is {UNSURE}: half of the rounds; do not quote it")
    ratios = [row["first_ms"] / row["median_ms"] for (_, system), row in rows.items() if system == "stof"]
    lines.append(f"first call over median: {percentile(ratios):.1f} at the 99th percentile")
    return lines


def _has_length(x, own: int) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[1] == own


def _own_length(inputs) -> int:
    """The example's length.  InputError where its first tensor has no second dimension."""
    tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    if not tensors or tensors[0].dim() < 2:
        shape = tuple(tensors[0].shape) if tensors else "no tensor"
        raise InputError(f"--lengths changes the second dimension of the inputs, and the first is {shape}")
    return tensors[0].shape[1]


def _tuple(inputs) -> tuple:
    return (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ())


def _eager(model, args, kwargs):
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    except Exception as error:  # whatever a model raises
        shapes = ", ".join(str(tuple(x.shape)) for x in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x))
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"eager PyTorch fails on inputs of {shapes}: {line}") from error
