"""An elementwise group, or a reduction with elementwise operators around it."""

import math
from collections import Counter

from tvm import te, tirx

from tir_kernels.fusion.group.indices import broadcast, flatten, of_view, unflatten
from tir_kernels.fusion.group.operators import ELEMENTWISE
from tir_kernels.fusion.group.problem import NORMS, REDUCTIONS, GroupProblem, Tensor, Value
from tir_kernels.problems.fusion_compute import as_float
from tir_kernels.problems.kind import Random, titled

PROBLEM, PARTS = GroupProblem, (Tensor, Value)
SHOWN = 12  # operators of a title


def sizes(problem: GroupProblem) -> dict[str, int]:
    """Elements read and written, and operators."""
    written = sum(math.prod(shape) for shape, _ in problem.outputs)
    return {"read": sum(problem.elements_read), "written": written, "operators": len(problem.values)}


def title(problem: GroupProblem) -> str:
    """As "group 4x64 multiply add": the shape of the first result, and operators that compute."""
    shape, _ = problem.outputs[0]
    names = [value.operator for value in problem.values if value.operator in (*ELEMENTWISE, *NORMS, *REDUCTIONS)]
    return titled(
        "group", {f"axis {axis}": n for axis, n in enumerate(shape)}, *names[:SHOWN], *["…"] * (len(names) > SHOWN)
    )


def tensors(problem: GroupProblem) -> list[te.Tensor]:
    """The sources, then the results."""
    sources = [te.placeholder(shape, dtype, name=f"source{i}") for i, (shape, dtype) in enumerate(problem.inputs)]
    expressions = _Expressions(problem, sources)
    outputs = []
    for i, (result, (shape, dtype)) in enumerate(zip(problem.results, problem.outputs)):
        name = "out" if i == 0 else f"result{i}"
        outputs.append(te.compute(shape, expressions.function(result, dtype), name=name))
    return [*sources, *outputs]


def draw(problem: GroupProblem, random: Random) -> list:
    """Normal numbers; integers are zeros."""
    return [random.normal(source.shape, source.dtype) for source in problem.sources]


def reference(problem: GroupProblem, inputs: list, torch, keep: None = None) -> list:
    """The results, operator by operator."""
    found = list(inputs)
    given = zip(problem.sources, inputs)
    wider = next((x.dtype for source, x in given if x.dtype != getattr(torch, source.dtype)), None)
    for value in problem.values:
        dtype = getattr(torch, value.dtype)
        dtype = wider if wider is not None and dtype.is_floating_point else dtype
        found.append(_torch_value(torch, value, [found[argument] for argument in value.arguments], dtype, inputs))
    return [found[result].contiguous() for result in problem.results]


def _torch_value(torch, value: Value, arguments: list, dtype, inputs: list):
    """One operator in PyTorch.  Floats have the dtype of inputs that are wider than the problem's."""
    name, numbers = value.operator, value.numbers
    if name == "constant":
        device = inputs[0].device if inputs else None
        return torch.tensor(numbers[0], dtype=dtype, device=device)
    if name == "cast":
        return arguments[0].to(dtype)
    if name in ELEMENTWISE:
        return ELEMENTWISE[name].torch(torch, *arguments, *numbers)
    if name == "reshape":
        return arguments[0].reshape(value.shape)
    if name == "permute":
        return arguments[0].permute(*map(int, numbers))
    if name == "slice":
        pairs = zip(numbers[::2], numbers[1::2], value.shape)
        return arguments[0][tuple(slice(first, first + (n - 1) * step + 1, step) for first, step, n in pairs)]
    if name == "gather":
        return torch.gather(arguments[0], int(numbers[0]), arguments[1].long())
    if name == "rows":
        return _torch_rows(torch, *arguments, *map(int, numbers))
    if name == "take":
        axis, place, *steps = map(int, numbers)
        for dimension, (n, step) in enumerate(zip(value.shape[axis:], steps)):
            along = torch.arange(n, device=arguments[0].device) * step
            place = place + along.reshape(-1, *[1] * (len(steps) - 1 - dimension))
        places = torch.as_tensor(place, device=arguments[0].device).expand(value.shape[axis : axis + len(steps)])
        return arguments[0].index_select(axis, places.flatten()).reshape(value.shape)
    if name == "roll":
        axis, first = map(int, numbers)
        return arguments[0].roll(-first, axis).narrow(axis, 0, value.shape[axis])
    if name == "broadcast":
        return arguments[0].expand(value.shape)
    if name == "concat":
        return torch.cat(arguments, dim=int(numbers[0]))
    if name == "pad":
        (x,) = arguments
        found = torch.full(value.shape, numbers[0], dtype=x.dtype, device=x.device)
        found[tuple(slice(int(first), int(first) + n) for first, n in zip(numbers[1:], x.shape))] = x
        return found
    if name in REDUCTIONS:
        return _torch_reduction(torch, value, arguments[0], dtype)
    eps, has_weight, has_bias = numbers
    x, *vectors = arguments
    remaining = iter(vector.expand(x.shape[-1:]) for vector in vectors)
    weight = next(remaining) if has_weight else None
    bias = next(remaining) if has_bias else None
    if name == "layer_norm":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    out = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return out if bias is None else out + bias


def _torch_rows(torch, x, places, axis: int, is_missing: int):
    """Slices of x at places, NaN outside of x if `is_missing`, else those of the nearest place."""
    nearest = places.long().clamp(0, x.shape[axis] - 1)
    found = x.index_select(axis, nearest.flatten()).reshape((*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]))
    inside = (places == nearest).reshape((*places.shape, *[1] * (x.ndim - axis - 1)))
    return torch.where(inside, found, torch.nan) if is_missing else found


def _torch_reduction(torch, value: Value, x, dtype):
    """A reduction; halves are joined in float32."""
    wide = x.float() if x.is_floating_point() and x.itemsize == 2 else x
    axes = sorted((int(axis) for axis in value.numbers), reverse=True)
    for axis in axes if value.operator == "prod" else ():
        wide = wide.prod(dim=axis)
    if axes and value.operator != "prod":
        reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[value.operator]
        wide = reduce(wide, dim=axes)
    return wide.reshape(value.shape).to(dtype)


class _Expressions:
    """Elements of a group's values as expressions of TIR."""

    def __init__(self, problem: GroupProblem, sources: list[te.Tensor]):
        self.problem, self.sources = problem, sources
        self.rows: dict[int, te.Tensor] = {}
        self.readers = Counter(argument for value in problem.values for argument in value.arguments)
        self.shared: dict[int, te.Tensor] = {}

    def function(self, number: int, dtype: str):
        """The element of a value, in its dtype, as a function of indices."""
        return lambda *at: self.element(number, at).astype(dtype)

    def element(self, number: int, at):
        """The element of a value at indices, floats as float32."""
        value = self.problem.value(number)
        if isinstance(value, Tensor):
            x = self.sources[number](*at)
            return as_float(x) if "float" in value.dtype else x
        if self.readers[number] > 1 and value.shape:
            # One stage for all readers: expressions of each would double with every value that is read twice.
            if number not in self.shared:
                self.shared[number] = te.compute(value.shape, lambda *i: self._computed(number, value, i), name="x")
            return self.shared[number](*at)
        return self._computed(number, value, at)

    def _computed(self, number: int, value: Value, at):
        name, arguments = value.operator, value.arguments
        shapes = [self.problem.value(argument).shape for argument in arguments]
        if name == "constant":
            return tirx.const(value.numbers[0], "float32" if "float" in value.dtype else value.dtype)
        if name in ELEMENTWISE or name == "cast":
            found = [self.element(a, broadcast(at, shape)) for a, shape in zip(arguments, shapes)]
            if name == "cast":
                return found[0].astype("float32" if "float" in value.dtype else value.dtype)
            return ELEMENTWISE[name].expression(*found, *value.numbers)
        if name == "concat":
            return self._concat(value, at, shapes)
        if name == "pad":
            index = of_view(value, at, shapes[0])
            inside = tirx.all(*(tirx.And(i >= 0, i < n) for i, n in zip(index, shapes[0])))
            filling = tirx.const(value.numbers[0], "float32" if "float" in value.dtype else value.dtype)
            return tirx.if_then_else(inside, self.element(arguments[0], index), filling)
        if name == "gather":
            index = [*at]
            index[int(value.numbers[0])] = self.element(arguments[1], at).astype("int32")
            return self.element(arguments[0], index)
        if name == "rows":
            return self._rows(value, at, shapes)
        if name in NORMS:
            return self._norm(number, value, at)
        if name in REDUCTIONS:
            return self._reduction(number, value, at)
        return self.element(arguments[0], of_view(value, at, shapes[0]))

    def _concat(self, value: Value, at, shapes):
        axis, found, end = int(value.numbers[0]), None, value.shape[int(value.numbers[0])]
        for argument, shape in reversed(list(zip(value.arguments, shapes))):
            begin = end - shape[axis]
            index = [*at]
            index[axis] = at[axis] - begin
            part = self.element(argument, index)
            found = part if found is None else tirx.if_then_else(at[axis] < end, part, found)
            end = begin
        return found

    def _rows(self, value: Value, at, shapes):
        (x, places), (axis, is_missing), at = value.arguments, map(int, value.numbers), list(at)
        end, extent = axis + len(shapes[1]), shapes[0][axis]
        place = self.element(places, at[axis:end])
        nearest = tirx.max(tirx.min(place, extent - 1), 0)
        found = self.element(x, [*at[:axis], nearest.astype("int32"), *at[end:]])
        return tirx.Select(nearest == place, found, tirx.const(math.nan, "float32")) if is_missing else found

    def _reduction(self, number: int, value: Value, at):
        """A stage of its own, of the axes that stay."""
        (argument,) = value.arguments
        shape, axes = self.problem.value(argument).shape, set(map(int, value.numbers))
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        if number not in self.rows:
            loops = {axis: te.reduce_axis((0, shape[axis]), name=f"k{axis}") for axis in sorted(axes)}

            def reduced(*index):
                places = loops | dict(zip(kept, index))
                element = self.element(argument, [places[axis] for axis in range(len(shape))])
                return _REDUCERS[value.operator](element, axis=list(loops.values()))

            self.rows[number] = te.compute([shape[axis] for axis in kept], reduced, name=value.operator)
        index = unflatten(flatten(at, value.shape), [shape[axis] for axis in kept])
        found = self.rows[number](*index)
        return found / math.prod(shape[axis] for axis in axes) if value.operator == "mean" else found

    def _norm(self, number: int, value: Value, at):
        if number not in self.rows:
            self.rows[number] = te.compute(value.shape, lambda *i: self.element(value.arguments[0], i), name="x")
        x, n = self.rows[number], value.shape[-1]
        eps, has_weight, has_bias = value.numbers
        total = lambda function: te.compute(value.shape[:-1], lambda *i: self._sum(x, n, i, function), name="total")
        mean = total(lambda element, _: element) if value.operator == "layer_norm" else None
        shift = (
            (lambda i: mean[i] / tirx.const(n, "float32")) if mean is not None else lambda _: tirx.const(0, "float32")
        )
        square = total(lambda element, i: (element - shift(i)) * (element - shift(i)))
        row = tuple(at[:-1])
        found = (x[tuple(at)] - shift(row)) * tirx.rsqrt(square[row] / n + tirx.const(eps, "float32"))
        remaining = iter(value.arguments[1:])
        found = found * self.element(next(remaining), at[-1:]) if has_weight else found
        return found + self.element(next(remaining), at[-1:]) if has_bias else found

    @staticmethod
    def _sum(x, n: int, row, function):
        k = te.reduce_axis((0, n), name="k")
        return te.sum(function(x[(*row, k)], tuple(row)), axis=k)


_REDUCERS = {
    "sum": te.sum,
    "mean": te.sum,
    "max": te.max,
    "min": te.min,
    "prod": te.comm_reducer(lambda a, b: a * b, lambda dtype: tirx.const(1, dtype), name="prod"),
}
