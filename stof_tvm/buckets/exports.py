"""Exported programs of a model for a range of shapes: one for sizes from 2 on, and one where a size is 1.

PyTorch broadcasts a dimension of 1, and models squeeze it: torch.export makes no program of both cases.
"""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim
from torch.export.dynamic_shapes import _DimHint
from torch.fx.experimental import _config as config
from torch.utils import _pytree as pytree

from stof_tvm.frontend.export import decompose, export_model
from stof_tvm.frontend.padding.dims import at, grows, size_of
from stof_tvm.frontend.shape_range import ShapeRange, range_of_program
from tir_kernels.errors import ExportError, InputError

aten = torch.ops.aten
# What torch.export says of a size that a model refuses.
BOUNDED = re.compile(r"Not all values of \w+ = L\['(\w+)'\]\.size\(\)\[(\d+)\] in the specified range")
LARGEST = re.compile(r"Suggested fixes:\n +\w+ = Dim\('\w+'(?:, min=\d+)?, max=(\d+)\)(?=\n\n|$)")
MORE = ' For more information, run with TORCH_LOGS="+dynamic".'


@dataclass(frozen=True)
class Export:
    """An exported program for a part of a range.

    Attributes
    ----------
    program : ExportedProgram or None
        In functional form; None once all is built.
    shapes : ShapeRange
        Of the program.
    assertions : tuple
        (an expression of the symbols that must hold, what PyTorch says where it does not).
    example : list
        Inputs that it was exported with.
    """

    program: Any  # an ExportedProgram until all is built
    shapes: ShapeRange
    assertions: tuple[tuple[Any, str], ...]
    example: list

    def released(self) -> "Export":
        """The same without the program and its weights."""
        return dataclasses.replace(self, program=None, example=[])

    def numbers(self, values: list) -> dict[Any, int]:
        """The number of each symbol in a call; InputError where the program does not take it."""
        numbers = self.shapes.numbers(values)
        for holds, told in self.assertions:
            if holds.subs(numbers) == False:  # noqa: E712  # SymPy's own
                raise InputError(f"the program does not take inputs of these shapes: {told}")
        return numbers


def export_of_program(program: torch.export.ExportedProgram, shapes: ShapeRange, example: list | None) -> Export:
    """The Export of a program that has dynamic shapes itself."""
    return Export(decompose(program, is_dynamic=True), shapes, _assertions(program), example or [])


def exports_of_module(
    model: torch.nn.Module, shapes: ShapeRange, limits: Mapping[Any, tuple[int, int]], values: list, dynamic_shapes
) -> dict[frozenset, Export]:
    """The Export for each set of symbols that are 1, for symbols that may be 1 and more.

    `values` are the example inputs of `shapes`, the model's range, and `limits` those of its symbols.  Raises
    ExportError as torch.export does, and for a model that refuses a part of the range.
    """
    symbols = shapes.symbols
    may_be_1 = [symbol for symbol in symbols if limits[symbol][0] == 1 < limits[symbol][1]]
    has_hints = any(isinstance(x, _DimHint) for x in pytree.tree_leaves(dynamic_shapes, lambda x: x is None))
    numbers = shapes.numbers(values)
    found = {}
    for count in range(len(may_be_1) + 1):
        for ones in map(frozenset, itertools.combinations(may_be_1, count)):
            sizes = {x: 1 if x in ones else max(numbers[x], min(2, limits[x][1])) for x in symbols}
            example = [resized(x, shape, sizes) for x, shape in zip(values, shapes.shapes, strict=True)]
            spec = _dynamic_shapes(model, shapes, limits, ones, has_hints)
            args, kwargs = shapes.signature.nest_inputs(example)
            try:
                program = export_model(model, args, kwargs, None, spec)
                functional = decompose(program, is_dynamic=True)
            except ExportError as error:
                if (programs := _without_cases(model, args, kwargs, spec)) is None:
                    if not ones:
                        export_model(model, args, kwargs)  # what no range is to blame for is raised as it is
                    where = f" where {', '.join(map(shapes.place, ones))} is 1" if ones else ""
                    raise ExportError(_refused(str(error), where)) from error.__cause__
                program, functional = programs
            found[ones] = Export(functional, range_of_program(program), _assertions(program), example)
    return found


def _refused(told: str, where: str) -> str:
    """Why a model was not exported for a range: how far it goes where torch.export says that, else what this says."""
    place, most = BOUNDED.search(told), LARGEST.search(told)
    head = f"the model was not exported for the whole range of shapes{where}"
    if place is not None and most is not None:
        name, dim = place.groups()
        return (
            f"{head}: it takes {name}[{dim}] up to {most[1]}, the end of a table or a branch on the size. Give its Dim "
            f"max={most[1]}, or for a branch lazy=True, which exports each shape by itself"
        )
    told = told.partition("\n\nThe error above occurred")[0].replace(MORE, "")
    return f"{head}; lazy=True exports each shape by itself, a smaller range may do: {told}"


def _without_cases(model: torch.nn.Module, args: tuple, kwargs: dict, spec):
    """(the program, its functional form), traced without asking which sizes are 1, or those of a whole table.

    PyTorch asks in order to choose between ways that give the same, as whether a slice is all of a table, and refuses
    a range in which the answer changes.  Without asking, it takes the way of all sizes from 2 on.  So this is None
    where a size may be less than 2 somewhere in the range, and where the model itself asks.
    """
    if not hasattr(config, "backed_size_oblivious"):
        return None
    try:
        with config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            program = export_model(model, args, kwargs, None, spec)
            functional = decompose(program, is_dynamic=True)
    except ExportError:
        return None
    limits = range_of_program(program).limits
    least = {symbol: limits[symbol][0] for symbol in limits if getattr(symbol, "is_Symbol", False)}
    sizes = _sizes(program) | _sizes(functional)
    return (program, functional) if all(_is_at_least_2(size, least) for size in sizes) else None


def _sizes(program: torch.export.ExportedProgram) -> set:
    """The sizes in a program that depend on its inputs' sizes."""
    values = pytree.tree_leaves([node.meta.get("val") for node in program.graph.nodes])
    sizes = {size_of(n) for x in values if isinstance(x, torch.Tensor) for n in x.shape}
    return {size for size in sizes if not isinstance(size, int)}


def _is_at_least_2(size, least: Mapping) -> bool:
    """Whether a size is 2 or more for all numbers of its symbols from `least` on."""
    return size.free_symbols <= least.keys() and grows(size, least) and at(size, least) >= 2


def _symbols(size) -> set:
    return set() if isinstance(size, int) else size.free_symbols


def resized(x: torch.Tensor, shape: tuple, sizes: Mapping) -> torch.Tensor:
    """An input with numbers for the symbols of its shape, its rows taken again from the first on."""
    for axis, size in enumerate(shape):
        if not isinstance(size, int):
            x = x.index_select(axis, torch.arange(int(size.subs(sizes)), device=x.device) % x.shape[axis])
    return x


def _dynamic_shapes(model: torch.nn.Module, shapes: ShapeRange, limits: Mapping, ones: frozenset, has_hints: bool):
    """The range as torch.export takes it, without the symbols that are 1."""
    places: dict[Any, int] = {}
    for shape in shapes.shapes:
        for size in shape:
            for symbol in _symbols(size):
                places[symbol] = places.get(symbol, 0) + 1
    dims: dict[Any, Any] = {}
    for symbol in places:
        least, most = limits[symbol]
        least = max(least, 2)
        if least >= most:
            dims[symbol] = None  # of one size
        elif has_hints and places[symbol] == 1:
            dims[symbol] = Dim.AUTO(min=least, max=most)
        else:
            dims[symbol] = Dim(re.sub(r"\W+", "_", shapes.place(symbol)).strip("_"), min=least, max=most)
    specs = [
        {axis: dim for axis, size in enumerate(shape) if (dim := _dim(size, dims, ones)) is not None}
        for shape in shapes.shapes
    ]
    leaves = [None if leaf.tensor is None else specs[leaf.tensor] for leaf in shapes.signature.in_leaves]
    args, kwargs = shapes.signature.in_spec.unflatten(leaves)
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def _dim(size, dims: Mapping, ones: frozenset):
    """A dimension as torch.export takes it: None where it has one size."""
    free = _symbols(size)
    if not free or free & ones:
        return None
    (symbol,) = free
    if dims[symbol] is None or size == symbol:
        return dims[symbol]
    offset = int(size.subs({symbol: 0}))
    return dims[symbol] * (int(size.subs({symbol: 1})) - offset) + offset


def _assertions(program: torch.export.ExportedProgram) -> tuple:
    """What a program asserts about sizes."""
    found = []
    for node in program.graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        value = node.args[0].meta["val"] if isinstance(node.args[0], torch.fx.Node) else node.args[0]
        if isinstance(value, torch.SymBool):
            found.append((value.node.expr, str(node.args[1]) if len(node.args) > 1 else ""))
    return tuple(found)
