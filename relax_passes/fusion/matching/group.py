"""Segments of elementwise operators, casts and views, with norms of rows or a reduction among them, as one group.

What an operator means decides, not where it stands: any graph of these operators matches.  Operands from outside the
segment are read through whatever views the segment takes of them; what depends on constants only is an operand.

The kernel computes in float32, so casts between floats vanish, and what PyTorch rounds to half precision in between is
not rounded.  That must change no more than roundings of results in half precision:

- A cast to half precision that is read on is refused unless every result that depends on it has this dtype: a model
  that rounds float32 values, or crosses from one half precision to the other, means it.
- Comparisons, and casts from floats to integers, take floats that are exact: operands, numbers, and views, choices,
  extrema and signs of these.  After arithmetic the last bit would decide.
"""

import math
from collections.abc import Callable

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst
from tvm.tirx import FloatImm, IntImm

from relax_passes.fusion.matching.segment_match import NoProblem, SegmentMatch
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, dtype_of, operator, permutation, shape_of, static_shape
from relax_passes.ir.strided_views import slice_bounds
from tir_kernels.errors import StofError
from tir_kernels.fusion.group.operators import ELEMENTWISE
from tir_kernels.fusion.group.problem import NORMS, READS, REDUCTIONS, GroupProblem, Tensor, Value
from tir_kernels.fusion.group.problem import VIEWS as GROUP_VIEWS
from tir_kernels.fusion.problem import DTYPES

HALF = ("float16", "bfloat16")
MAX_RUNS = 4  # of neighbours that a take joins
INDEX_DTYPES = ("int32", "int64")
EXACT_INTEGERS = 1 << 53  # up to which a float holds all integers
CLASSES = ("isnan", "isinf", "isfinite")
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", *CLASSES)
# Operators whose floats are among their operands'.
KEEP_FLOATS = (
    "maximum",
    "minimum",
    "max",
    "min",
    "negative",
    "abs",
    "relu",
    "clip",
    "where",
    "constant",
    *READS,
    *GROUP_VIEWS,
)
# Relax's names of elementwise operators, where they differ from a group's.
NAMES = {f"nn.{name}": name for name in ("relu", "gelu", "gelu_tanh", "silu", *NORMS)}


def match_group(graph: OperatorGraph) -> SegmentMatch:
    """The group that a segment computes.  Raises NoProblem with the reason if there is none."""
    body = graph.function.body.body
    results = graph.bindings.value(body)
    outputs = list(results.fields) if isinstance(results, relax.Tuple) else [body]
    return _Group(graph.bindings, graph.closed).match(outputs)


def match_copy(bindings: Bindings, closed: set, views: list[relax.Var]) -> SegmentMatch:
    """The group that computes views from tensors that are no views, by copying.  Raises NoProblem if there is none."""
    return _Copy(bindings, closed).match(views)


class _Group:
    def __init__(self, bindings: Bindings, closed: set):
        self.bindings, self.closed = bindings, closed
        self.sources: list[tuple[relax.Expr, Tensor]] = []
        self.values: list[Value] = []
        self.tokens: dict = {}  # expression -> ("source", index) or ("value", index)

    def match(self, outputs: list) -> SegmentMatch:
        """The problem whose results are `outputs`."""
        found = [self._of(output) for output in outputs]
        if any(kind != "value" or self._is_number((kind, index)) for kind, index in found):
            raise NoProblem("a result is an operand or a number")
        count = len(self.sources)
        number = lambda token: token[1] + count * (token[0] == "value")
        values = tuple(
            Value(v.operator, tuple(map(number, v.arguments)), v.shape, v.dtype, v.numbers) for v in self.values
        )
        try:
            problem = GroupProblem(tuple(tensor for _, tensor in self.sources), values, tuple(map(number, found)))
        except StofError as error:
            raise NoProblem(str(error)) from None
        if not self.sources:
            raise NoProblem("it reads no tensor")
        _check_roundings(problem)
        return SegmentMatch(problem, tuple(expr for expr, _ in self.sources), tuple(outputs))

    def _of(self, expr):
        """The token of an expression's value."""
        if isinstance(expr, relax.Var) and isinstance(self.bindings.values.get(expr), relax.Var):
            return self._of(self.bindings.values[expr])
        if expr not in self.tokens:
            self.tokens[expr] = self._made(expr)
        return self.tokens[expr]

    def _made(self, expr):
        if static_shape(expr) is None:
            raise NoProblem("a value has no shape of numbers")
        number = self.bindings.scalar(expr)
        is_exact = "float" in dtype_of(expr) or number is not None and abs(number) < EXACT_INTEGERS
        if number is not None and math.isfinite(number) and is_exact:
            return self._value("constant", (), expr, (_exact(number, dtype_of(expr)),), shape=())
        value = self.bindings.value(expr)
        is_closed = expr in self.closed and not self._expands(value)
        if is_closed or isinstance(value, GenericConst) or not isinstance(value, relax.Expr):
            return self._source(expr)
        if isinstance(value, relax.TupleGetItem):
            return self._split(expr, value)
        if not isinstance(value, relax.Call):
            return self._source(expr)
        return self._call(expr, value)

    def _expands(self, value) -> bool:
        """Whether a value repeats elements of another one, by views alone: it is read in place, and never stored."""
        while isinstance(value, relax.Call) and operator(value) in (*SAME_ELEMENTS, "permute_dims", "broadcast_to"):
            source = value.args[0]
            if math.prod(shape_of(source)) < math.prod(shape_of(value)):
                return True
            value = self.bindings.value(source)
        return False

    def _source(self, expr):
        self.sources.append((expr, Tensor(shape_of(expr), dtype_of(expr))))
        return "source", len(self.sources) - 1

    def _value(self, name: str, arguments, expr, numbers=(), shape=None):
        shape = shape_of(expr) if shape is None else shape
        self.values.append(Value(name, tuple(arguments), shape, dtype_of(expr), tuple(numbers)))
        return "value", len(self.values) - 1

    def _call(self, expr, call: relax.Call):
        name = operator(call)
        if (view := VIEWS.get(name)) is not None:
            return view(self, expr, call)
        if name == "gather_elements":
            axis = int(call.attrs.axis) % len(shape_of(expr))
            return self._value("gather", [self._tensor(argument) for argument in call.args], expr, (axis,))
        if name == "astype":
            return self._value("cast", [self._of(call.args[0])], expr)
        if name == "clip":
            bounds = [_number(argument) for argument in call.args[1:]]
            bounds = [float(bound) for bound in bounds if bound is not None and math.isfinite(bound)]
            if len(bounds) != 2:
                raise NoProblem("clip by bounds that are no finite numbers")
            return self._value("clip", [self._of(call.args[0])], expr, bounds)
        name = NAMES.get(name, name)
        if name in NORMS:
            return self._norm(name, expr, call)
        if name in REDUCTIONS:
            rank = len(shape_of(call.args[0]))
            axes = range(rank) if call.attrs.axis is None else sorted(int(axis) % rank for axis in call.attrs.axis)
            return self._value(name, [self._tensor(call.args[0])], expr, axes)
        if name not in ELEMENTWISE:
            raise NoProblem(f"{name} is no operator of elementwise groups")
        return self._value(name, [self._of(argument) for argument in call.args], expr)

    def _norm(self, name: str, expr, call: relax.Call):
        axes, rank = [int(axis) for axis in call.attrs.axes], len(shape_of(call))
        if [axis % rank for axis in axes] != [rank - 1]:
            raise NoProblem(f"{name} along the dimensions {axes}")
        used = [True, False] if name == "rms_norm" else [bool(call.attrs.scale), bool(call.attrs.center)]
        eps = float(call.attrs.epsilon)
        if not 0 <= eps < math.inf:
            raise NoProblem(f"{name} with eps={eps}")
        vectors = [argument for argument, is_used in zip(call.args[1:], used) if is_used]
        arguments = [self._of(argument) for argument in (call.args[0], *vectors)]
        return self._value(name, arguments, expr, (eps, *map(int, used)))

    # -- views -----------------------------------------------------------------------------------------------------

    def _split(self, expr, item: relax.TupleGetItem):
        call = self.bindings.call(item.tuple_value, "split")
        if call is None:
            return self._field(expr, item)
        shape = shape_of(call.args[0])
        axis = int(call.attrs.axis) % len(shape)
        first = sum(int(field.shape[axis]) for field in list(call.ty.fields)[: item.index])
        return self._sliced(expr, call.args[0], {axis: (first, 1)})

    def _field(self, expr, item: relax.TupleGetItem):
        """A field of a tuple that is no split: an operand where the tuple is."""
        if isinstance(self.bindings.value(item.tuple_value), relax.Call):
            raise NoProblem("a field of a tuple that is no split")
        return self._source(expr)

    def _sliced(self, expr, source, firsts: dict[int, tuple[int, int]]):
        pairs = [firsts.get(axis, (0, 1)) for axis in range(len(shape_of(source)))]
        return self._value("slice", [self._of(source)], expr, [n for pair in pairs for n in pair])

    def _strided_slice(self, expr, call: relax.Call):
        bounds = slice_bounds(call)
        if bounds is None:
            raise NoProblem("a slice whose bounds are not known, or that runs backwards")
        return self._sliced(expr, call.args[0], {axis: (first, step) for axis, (first, _, step) in bounds.items()})

    def _reshape(self, expr, call: relax.Call):
        return self._value("reshape", [self._of(call.args[0])], expr)

    def _permute(self, expr, call: relax.Call):
        return self._value("permute", [self._of(call.args[0])], expr, permutation(call))

    def _broadcast(self, expr, call: relax.Call):
        return self._value("broadcast", [self._of(call.args[0])], expr)

    def _concat(self, expr, call: relax.Call):
        fields = self.bindings.operands(call)
        axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % len(shape_of(expr))
        return self._value("concat", [self._tensor(field) for field in fields], expr, (axis,))

    def _tensor(self, expr):
        """The token of a value that needs its own shape; a number has the shape () among the values."""
        token = self._of(expr)
        return self._value("broadcast", [token], expr) if self._is_number(token) else token

    def _is_number(self, token) -> bool:
        kind, index = token
        return kind == "value" and self.values[index].operator == "constant"

    def _take(self, expr, call: relax.Call):
        """A take by constant places: a view if they lie evenly, around the end as torch.roll's, or in few runs."""
        source, index = call.args
        shape, constant = shape_of(source), self.bindings.value(index)
        if call.attrs.axis is None and len(shape) != 1:
            raise NoProblem("take from all dimensions as one")
        if not isinstance(constant, GenericConst):
            return self._rows(expr, call)
        axis, places = int(call.attrs.axis or 0) % len(shape), constant.value.numpy().astype(np.int64)
        if places.size == 0 or places.min() < 0 or places.max() >= shape[axis]:
            raise NoProblem(f"take of places outside of {shape[axis]}")
        strides = _strides(places)
        if strides is not None:
            first = int(places.flat[0])
            return self._value("take", [self._of(source)], expr, (axis, first, *strides))
        if places.ndim == 1 and (places == (places[0] + np.arange(places.size)) % shape[axis]).all():
            return self._value("roll", [self._of(source)], expr, (axis, int(places[0])))
        runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if places.ndim == 1 else []
        if not 1 < len(runs) <= MAX_RUNS:
            if dtype_of(index) not in INDEX_DTYPES:
                raise NoProblem(f"take by scattered places in {dtype_of(index)}")
            return self._value("rows", [self._tensor(source), self._tensor(index)], expr, (axis, 0))
        parts = []
        for run in runs:
            kept = tuple(len(run) if a == axis else n for a, n in enumerate(shape))
            numbers = [n for a in range(len(shape)) for n in ((int(run[0]) if a == axis else 0), 1)]
            parts.append(self._value("slice", [self._of(source)], expr, numbers, shape=kept))
        return self._value("concat", parts, expr, (axis,))

    def _rows(self, expr, call: relax.Call):
        """A take by places that are values: those outside are NaN, or the nearest, as the model wants them."""
        source, index = call.args
        mode, is_float = str(call.attrs.mode), "float" in dtype_of(source)
        if dtype_of(index) not in INDEX_DTYPES or not (mode == "clip" or mode in ("nan", "fast") and is_float):
            raise NoProblem(f"take of {dtype_of(source)} by {dtype_of(index)} in mode {mode}")
        axis = int(call.attrs.axis or 0) % len(shape_of(source))
        tokens = [self._tensor(source), self._tensor(index)]
        return self._value("rows", tokens, expr, (axis, int(mode != "clip")))

    def _pad(self, expr, call: relax.Call):
        widths = [int(n) for n in call.attrs.pad_width]
        if str(call.attrs.pad_mode) != "constant" or min(widths, default=0) < 0:
            raise NoProblem(f"nn.pad by {widths}, {call.attrs.pad_mode}")
        value = _exact(float(call.attrs.pad_value), dtype_of(expr))
        return self._value("pad", [self._of(call.args[0])], expr, (value, *widths[::2]))


class _Copy(_Group):
    """Everything but views is a source."""

    def _call(self, expr, call: relax.Call):
        view = VIEWS.get(operator(call))
        return self._source(expr) if view is None else view(self, expr, call)

    def _field(self, expr, item: relax.TupleGetItem):
        return self._source(expr)


def _check_roundings(problem: GroupProblem) -> None:
    """Raise NoProblem if a group's kernel would not round where it matters."""
    count = len(problem.sources)
    exact = [True] * count  # whether each value is a float that no arithmetic has changed, or no float
    casts: list[set[int]] = [set() for _ in range(count)]  # to half precision, that each value depends on
    for number, value in enumerate(problem.values, count):
        before = [problem.value(argument).dtype for argument in value.arguments]
        keeps = all(exact[argument] for argument in value.arguments)
        is_float = value.dtype in DTYPES
        if (value.operator in COMPARISONS or value.operator == "cast" and not is_float) and not keeps:
            raise NoProblem(f"{value.operator} to {value.dtype} of floats that are computed in the segment")
        narrows = value.operator == "cast" and value.dtype in HALF and before != [value.dtype]
        widens = value.operator == "cast" and not narrows
        exact.append(not is_float or keeps and (value.operator in KEEP_FLOATS or widens))
        casts.append(set().union(*(casts[a] for a in value.arguments), [number] if narrows else []))
    for result in problem.results:
        for cast in casts[result] - {result}:
            if problem.value(cast).dtype != problem.value(result).dtype:
                raise NoProblem(f"a cast to {problem.value(cast).dtype} on the way to {problem.value(result).dtype}")


def _strides(places: np.ndarray) -> list[int] | None:
    """The distances of neighbours along each dimension if they are the same everywhere, else None."""
    strides = [
        int(np.take(places, 1, axis).flat[0] - places.flat[0]) if n > 1 else 0 for axis, n in enumerate(places.shape)
    ]
    even = places.flat[0] + sum(stride * i for stride, i in zip(strides, np.indices(places.shape, sparse=True)))
    return strides if (places == even).all() else None


VIEWS: dict[str, Callable] = {
    **dict.fromkeys(SAME_ELEMENTS, _Group._reshape),
    "permute_dims": _Group._permute,
    "strided_slice": _Group._strided_slice,
    "broadcast_to": _Group._broadcast,
    "concat": _Group._concat,
    "take": _Group._take,
    "nn.pad": _Group._pad,
}


def _number(argument) -> float | None:
    value = getattr(argument, "value", argument)
    return value.value if isinstance(value, FloatImm | IntImm) else value if isinstance(value, int | float) else None


def _exact(number: float, dtype: str) -> int | float:
    return float(number) if "float" in dtype else int(number)
