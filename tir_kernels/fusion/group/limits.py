"""What the kernels of groups share before any code: the operators and dtypes that they compute, and bytes that move."""

import math

import tvm

from tir_kernels.fusion.group.operators import APPROXIMATE, ELEMENTWISE, OF_BOOLEANS, OF_FLOATS, OF_INTEGERS
from tir_kernels.fusion.group.problem import VIEWS, GroupProblem
from tir_kernels.fusion.problem import DTYPES
from tir_kernels.fusion.rows.geometry import MAX_INT32

MAX_VALUES = 96
MAX_CONDITIONS = 64
SOURCE_DTYPES = (*DTYPES, "int64", "int32", "bool")
MOVED_DTYPES = (*SOURCE_DTYPES, "int8", "uint8", "int16", "uint16", "uint32", "uint64", "float64")  # without arithmetic


def refusal_of_values(problem: GroupProblem, max_sources: int, max_results: int) -> str | None:
    """Why no kernel of elementwise operators and views computes the values of a group, or None."""
    counts = (len(problem.sources), max_sources, "sources"), (len(problem.results), max_results, "results")
    for count, most, what in (*counts, (len(problem.values), MAX_VALUES, "operators")):
        if count > most:
            return f"{count} {what}, more than {most}"
    everything = [problem.value(number) for number in range(len(problem.sources) + len(problem.values))]
    legal: tuple[str, ...] = MOVED_DTYPES if all(value.operator in VIEWS for value in problem.values) else SOURCE_DTYPES
    for value in everything:
        if value.dtype not in legal:
            return f"it holds {value.dtype}, which is none of {', '.join(legal)}"
        if math.prod(value.shape) > MAX_INT32:
            return f"{value.shape} is 2^31 elements or more; indices are 32-bit"
        if not math.prod(value.shape):
            return f"{value.shape} has no elements"
    exact = any(dtype == "float32" for _, dtype in problem.outputs)
    for value in problem.values:
        dtypes = {problem.value(argument).dtype for argument in value.arguments}
        if exact and value.operator in APPROXIMATE:
            return f"{value.operator} in a result of float32: it is right to half precision's accuracy"
        if value.operator in OF_FLOATS and not dtypes <= set(DTYPES):
            return f"{value.operator} of {' and '.join(sorted(dtypes))}"
        if value.operator in OF_INTEGERS and not dtypes <= {"int32", "int64"}:
            return f"{value.operator} of {' and '.join(sorted(dtypes))}"
        if value.operator in ELEMENTWISE and value.operator not in OF_BOOLEANS | {"where"} and "bool" in dtypes:
            return f"{value.operator} of bool"
    if (size := max(_conditions(problem).values(), default=0)) > MAX_CONDITIONS:
        return f"{size} operators in one condition, which is computed where it is used; at most {MAX_CONDITIONS} are"
    return None


def _conditions(problem: GroupProblem) -> dict[int, int]:
    """For each boolean value, and casts of it, the operators of its expression: they lie in no registers."""
    sizes: dict[int, int] = {}
    for number, value in enumerate(problem.values, len(problem.sources)):
        if value.dtype == "bool" or value.operator == "cast" and value.arguments[0] in sizes:
            sizes[number] = 1 + sum(sizes.get(argument, 0) for argument in value.arguments)
    return sizes


def bytes_moved(problem: GroupProblem) -> int:
    """Bytes of what a group's views lead to, read once, and of its results."""
    read = sum(
        count * tvm.DataType(source.dtype).itemsize for count, source in zip(problem.elements_read, problem.sources)
    )
    return read + sum(math.prod(shape) * tvm.DataType(dtype).itemsize for shape, dtype in problem.outputs)
