"""What values read of sources, as affine forms of their indices: positions, and conditions of being read."""

from dataclasses import dataclass

from tvm import tirx

from tir_kernels.fusion.group.domains import arguments_of
from tir_kernels.fusion.group.indices import flatten, of_view
from tir_kernels.fusion.group.problem import GroupProblem, Tensor
from tir_kernels.fusion.group.symbols import Symbols, substitute

MOST_READS = 64  # of sources, that are looked at


@dataclass(frozen=True)
class Affine:
    """`base` + the sum of indices times `strides`; 0 where an axis has one element."""

    base: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Guard:
    """The condition 0 <= `index` < `extent`, without which a value is not read: a part of a concatenation, a pad."""

    index: Affine
    extent: int


@dataclass(frozen=True)
class Read:
    """A source's elements at affine positions, under all of the guards."""

    source: int
    position: Affine
    guards: tuple[Guard, ...]


def affine_reads(problem: GroupProblem, values: tuple[int, ...], shape) -> list[Read]:
    """What values of one shape read at affine positions; nothing where there is more than is looked at."""
    symbols = Symbols()
    variables = [symbols.new(f"i{axis}", n) for axis, n in enumerate(shape)]
    zero = tirx.IntImm("int32", 0)
    start = [zero if n == 1 else var for var, n in zip(variables, shape)]
    found: dict[tuple[int, Affine], tuple[Guard, ...]] = {}
    pending: list = [(value, start, ()) for value in values]
    seen: set[tuple] = set()
    while pending:
        number, at, guards = pending.pop()
        at = symbols.simplified(at)
        if (key := (number, *map(str, at), guards)) in seen:
            continue
        seen.add(key)
        value = problem.value(number)
        if len(found) > MOST_READS or len(seen) > MOST_READS * 16:
            return []
        if isinstance(value, Tensor):
            position = affine(symbols, variables, flatten(at, value.shape))
            if position is not None:
                read = number, position
                # One that is reached in several ways is read under any of their conditions.
                found[read] = guards if found.get(read, guards) == guards else ()
            continue
        conditions = _conditions(problem, value, at)
        for (argument, places), own in zip(arguments_of(problem, value, at), conditions, strict=True):
            more = [(affine(symbols, variables, index), n) for index, n in own]
            known = tuple(Guard(index, n) for index, n in more if index is not None)
            pending.append((argument, places, (*guards, *(guard for guard in known if guard not in guards))))
    return [Read(*read, guards) for read, guards in found.items()]


def _conditions(problem: GroupProblem, value, at: list) -> list[list]:
    """For each argument that is read at `at`, (index, extent) that it is read under."""
    if value.operator == "concat":
        axis, found, end = int(value.numbers[0]), [], 0
        for argument in value.arguments:
            n = problem.value(argument).shape[axis]
            found.append([(at[axis] - end, n)])
            end += n
        return found
    if value.operator == "pad":
        (argument,) = value.arguments
        source = problem.value(argument).shape
        indices = of_view(value, at, source)
        return [[(index, n) for index, n, wide in zip(indices, source, value.shape) if n != wide]]
    return [[] for _ in arguments_of(problem, value, at)]


def affine(symbols: Symbols, variables, expression) -> Affine | None:
    """An expression as an affine form of the variables, or None if it is none."""
    zero, one = (tirx.IntImm("int32", number) for number in (0, 1))
    base = symbols.analyzer.simplify(substitute(expression, dict.fromkeys(variables, zero)))
    ends = [substitute(expression, {v: one if v.same_as(var) else zero for v in variables}) for var in variables]
    strides = [symbols.analyzer.simplify(end - base) for end in ends]
    if not all(isinstance(number, tirx.IntImm) for number in (base, *strides)):
        return None
    found = Affine(int(base), tuple(map(int, strides)))
    rest = symbols.analyzer.simplify(expression - expression_of(found, variables))
    return found if isinstance(rest, tirx.IntImm) and int(rest) == 0 else None


def expression_of(form: Affine, indices):
    """An affine form at indices."""
    found = tirx.IntImm("int32", form.base)
    for index, stride in zip(indices, form.strides):
        found = found + index * stride if stride else found
    return found
