"""The shapes that a call may have, as `torch.export` describes them: symbols with ranges, and expressions of these."""

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx.experimental import _config as symbolic
from torch.utils._sympy.numbers import int_oo

from stof_tvm.frontend.export import distinct
from stof_tvm.signature import Signature, read_signature, wrong_tensor
from tir_kernels.errors import InputError

LEAST = 1  # of a dimension that may change: engines have no empty tensors
MOST_SHOWN = 4  # numbers in a message
Size = Any  # an int, or an expression of SymPy


@dataclass(frozen=True)
class ShapeRange:
    """Attributes
    ----------
    signature : Signature
        Of the inputs only; its shapes are not to be used.
    shapes : tuple of tuples
        Of each input tensor: numbers, symbols and expressions of these.
    limits : dict
        (least, most) of symbols and expressions; most is None where there is no limit.
    guards : callable, optional
        Raises AssertionError for leaves of a call whose shapes the program was not exported for.
    guard_texts : tuple of str or None
        What guards demand besides the limits, as torch.export writes it; None where PyTorch does not tell.
    """

    signature: Signature
    shapes: tuple[tuple[Size, ...], ...]
    limits: Mapping[Any, tuple[int, int | None]]
    guards: Callable | None = None
    guard_texts: tuple[str, ...] | None = ()

    @property
    def is_dynamic(self) -> bool:
        """Whether there is more than one set of shapes."""
        return any(not isinstance(size, int) for shape in self.shapes for size in shape)

    def numbers(self, values) -> dict[Any, int]:
        """The number of each symbol in a call with these inputs, in the signature's order.

        Raises InputError for another dtype or number of dimensions, and for a size that is outside its range or not as
        the sizes of other dimensions demand.
        """
        for spec, shape, value in zip(self.signature.inputs, self.shapes, values, strict=True):
            is_tensor = isinstance(value, torch.Tensor) and value.layout is torch.strided
            if not is_tensor or value.dim() != len(shape) or str(value.dtype).removeprefix("torch.") != spec.dtype:
                raise wrong_tensor(spec.name, spec.dtype, self._text(spec.name), value)
        numbers: dict[Any, int] = {}
        sizes = [
            (spec.name, dim, size, value.shape[dim])
            for spec, shape, value in zip(self.signature.inputs, self.shapes, values, strict=True)
            for dim, size in enumerate(shape)
        ]
        # Symbols that are a dimension themselves come first: expressions follow from them.
        for name, dim, size, given in sorted(sizes, key=lambda entry: _is_expression(entry[2])):
            if (rule := self._broken_rule(size, given, numbers)) is not None:
                raise InputError(f"{name} dimension {dim} is {given}; it must be {rule}")
        if self.guards is not None:
            leaves = self.signature.in_leaves
            try:
                self.guards(*(leaf.value if leaf.tensor is None else values[leaf.tensor] for leaf in leaves))
            except AssertionError as error:
                told = ", ".join(f"{spec.name} {tuple(x.shape)}" for spec, x in zip(self.signature.inputs, values))
                raise InputError(f"the program was not exported for inputs of {told}: {error}") from None
        return numbers

    @property
    def symbols(self) -> list:
        """The symbols, in the order of the inputs."""
        sizes = [size for shape in self.shapes for size in shape if not isinstance(size, int)]
        return list(dict.fromkeys(x for size in sizes for x in sorted(size.free_symbols, key=str)))

    def place(self, symbol) -> str:
        """A symbol in words: the first dimension that it is, else the first that it is a part of."""
        places = [
            (spec.name, dim, size)
            for spec, shape in zip(self.signature.inputs, self.shapes)
            for dim, size in enumerate(shape)
            if not isinstance(size, int) and symbol in size.free_symbols
        ]
        name, dim, _ = next((place for place in places if place[2] == symbol), places[0])
        return f"{name}[{dim}]"

    def text_of(self, shapes: Sequence[Sequence[int]]) -> str:
        """Shapes of the inputs in words."""
        return ", ".join(f"{spec.name} {tuple(shape)}" for spec, shape in zip(self.signature.inputs, shapes))

    def __str__(self) -> str:
        return ", ".join(f"{spec.name} {self._text(spec.name)}" for spec in self.signature.inputs)

    def _broken_rule(self, size: Size, given: int, numbers: dict[Any, int]) -> str | None:
        """What a dimension must be, if it is not; adds the number of a symbol that has none yet."""
        if isinstance(size, int):
            return None if size == given else str(size)
        if not self._is_within(size, given):
            return self._members_text(size)
        if size.is_Symbol and numbers.setdefault(size, given) == given:
            return None
        is_solved = _solve(size, given, numbers)
        wanted = _value(size, numbers)
        if wanted is None or is_solved and wanted != given:
            return self._members_text(size)
        if wanted != given:
            names = self._names()
            free = [symbol for symbol in sorted(size.free_symbols, key=str) if symbol not in self._homes()]
            why = " and ".join(f"{names[str(symbol)]} is {numbers[symbol]} by {self.place(symbol)}" for symbol in free)
            return f"{self._expression_text(size)} = {wanted}{', because ' if why else ''}{why}"
        # An expression's own limits count: torch.export takes 2 for the least number of a Dim that is no dimension.
        fits = size in self.limits or all(self._is_within(symbol, numbers[symbol]) for symbol in size.free_symbols)
        return None if fits else self._members_text(size)

    def _is_within(self, size, given: int) -> bool:
        least, most = self.limits.get(size, (LEAST, None))
        return least <= given and (most is None or given <= most)

    def _text(self, name: str) -> str:
        number = [spec.name for spec in self.signature.inputs].index(name)
        sizes = [self._size_text(size, (name, dim)) for dim, size in enumerate(self.shapes[number])]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    def _size_text(self, size: Size, place: tuple[str, int] | None) -> str:
        """A size in words: a number, a range at the dimension that is a symbol, an expression of such dimensions."""
        if isinstance(size, int):
            return str(size)
        homes = self._homes()
        if not _is_expression(size) and homes[size] == place:
            return _limits_text(self.limits.get(size, (LEAST, None)))
        told = self._expression_text(size)
        if all(symbol in homes for symbol in size.free_symbols):
            return told
        least, most = self.limits.get(size, (LEAST, None))
        return f"{told} of at least {least}" if most is None else f"{told} from {least} to {most}"

    def _members_text(self, size: Size) -> str:
        """What a dimension may be: a range, or the first and last of the numbers that a linear expression gives."""
        least, most = self.limits.get(size, (LEAST, None))
        if not _is_expression(size):
            return _limits_text((least, most))
        symbol, *others = size.free_symbols
        zero, one = (_value(size, {symbol: n}) for n in (0, 1))
        if others or symbol in self._homes() or zero is None or one is None or one <= zero:
            return self._size_text(size, None)
        step = one - zero
        if step == 1:
            return _limits_text((least, most))
        least += (zero - least) % step
        if most is None:
            return f"{least}, {least + step}, {least + 2 * step}, … ({self._expression_text(size)})"
        first = [str(n) for n in range(least, most + 1, step)]
        shown = first if len(first) <= MOST_SHOWN else [*first[: MOST_SHOWN - 1], "…", first[-1]]
        return f"{' or '.join(filter(None, (', '.join(shown[:-1]), shown[-1])))} ({self._expression_text(size)})"

    def _expression_text(self, size: Size) -> str:
        """An expression of dimensions that are symbols, and of n, n2, … for symbols that are no dimension."""
        names = self._names()
        return re.sub(r"[A-Za-z_]\w*", lambda word: names.get(word[0], word[0]), str(size))

    def _names(self) -> dict[str, str]:
        """What symbols are called, by what SymPy calls them."""
        homes = self._homes()
        free = [str(symbol) for symbol in self.symbols if symbol not in homes]
        names = {symbol: "n" if number == 1 else f"n{number}" for number, symbol in enumerate(free, 1)}
        return names | {str(symbol): f"{home[0]}[{home[1]}]" for symbol, home in homes.items()}

    def _homes(self) -> dict[Any, tuple[str, int]]:
        """The first dimension, as (input, dimension), that is a symbol itself."""
        homes: dict[Any, tuple[str, int]] = {}
        for spec, shape in zip(self.signature.inputs, self.shapes):
            for dim, size in enumerate(shape):
                if not isinstance(size, int) and size.is_Symbol:
                    homes.setdefault(size, (spec.name, dim))
        return homes


def range_of_module(model: torch.nn.Module, args: tuple, kwargs: dict, dynamic_shapes) -> ShapeRange:
    """The range that `dynamic_shapes` gives the inputs of a module.  InputError where torch.export refuses it.

    torch.export reads it, for a module that takes the same inputs and does nothing with them: so no model is refused
    or specialised for what it does with a size.
    """
    args, kwargs = distinct((args, kwargs))
    reader = torch.nn.Module()

    def forward(*args, **kwargs):
        return torch.zeros(())

    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]  # torch.export reads names
    reader.forward = forward
    try:
        # Else torch.export fixes a dimension that is 1 in the example inputs.
        with symbolic.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]  # made when it is imported
            program = torch.export.export(reader, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        told = re.sub(r" For more information.*", "", str(error).partition("\n\nThe error above occurred")[0])
        if "specialized it to be a constant" in told:
            told += "\nTake example inputs in which the dimension, and the Dim that it is derived from, is 2 or more"
        raise InputError(f"dynamic_shapes does not fit the example inputs: {told}") from error
    return _range(program, model.forward)


def has_dynamic_shapes(model) -> bool:
    """Whether a model is an exported program with dynamic shapes."""
    if not isinstance(model, torch.export.ExportedProgram):
        return False
    inputs = {spec.arg.name for spec in model.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT}
    values = (node.meta.get("val") for node in model.graph.find_nodes(op="placeholder") if node.name in inputs)
    return any(not isinstance(n, int) for x in values if isinstance(x, torch.Tensor) for n in x.shape)


def range_of_program(program: torch.export.ExportedProgram) -> ShapeRange:
    """The range of an exported program's inputs, with the guards that torch.export found."""
    found = _range(program, None)
    with warnings.catch_warnings():
        # torch copies its own pytree specs in a way that it deprecates itself.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        guards = getattr(program.module(), "_guards_fn", None) if found.is_dynamic else None
    texts = getattr(program, "_guards_code", None)
    return dataclasses.replace(found, guards=guards, guard_texts=None if texts is None else tuple(texts))


def _range(program: torch.export.ExportedProgram, forward) -> ShapeRange:
    signature = read_signature(program, forward, inputs_only=True)
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    inputs = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    tensors = [values[name] for name in dict.fromkeys(inputs) if isinstance(values.get(name), torch.Tensor)]
    limits = {
        size: (max(int(values.lower), LEAST), None if values.upper >= int_oo else int(values.upper))
        for size, values in program.range_constraints.items()
    }
    shapes = tuple(tuple(n if isinstance(n, int) else _as_size(n) for n in x.shape) for x in tensors)
    return ShapeRange(signature, shapes, limits)


def _as_size(n: torch.SymInt) -> Size:
    expression = n.node.expr
    return int(expression) if expression.is_number else expression


def _is_expression(size: Size) -> bool:
    return not isinstance(size, int) and not size.is_Symbol


def _solve(size: Size, given: int, numbers: dict[Any, int]) -> bool:
    """Whether one symbol of a size had no number yet; adds its number.  A derived Dim is a linear expression."""
    unknown = [symbol for symbol in size.free_symbols if symbol not in numbers]
    if len(unknown) == 1:
        zero, one = (_value(size, {**numbers, unknown[0]: n}) for n in (0, 1))
        if zero is not None and one is not None and one > zero:
            numbers[unknown[0]] = (given - zero) // (one - zero)
    return len(unknown) == 1


def _value(size: Size, numbers: dict[Any, int]) -> int | None:
    if size in numbers:  # SymPy takes a hundred times as long
        return numbers[size]
    value = size.subs(numbers)
    return int(value) if value.is_number else None


def _limits_text(limits: tuple[int, int | None]) -> str:
    least, most = limits
    return f"at least {least}" if most is None else f"{least} to {most}"
