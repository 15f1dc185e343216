"""What NumPy computes of closed expressions is, bit for bit, what a compiled program gives; the rest is left to it."""

import ml_dtypes  # noqa: F401  (makes bfloat16 a dtype of NumPy)
import numpy as np
import pytest
from tvm import relax

from relax_passes.ir.bindings import Bindings
from relax_passes.legalizations.closed_values import _program, _run, closed_values
from relax_passes.legalizations.exact_values import ExactValues

op = relax.op
LARGEST = 1 << 20


def constant(numbers, dtype="int64"):
    return relax.const(np.asarray(numbers).astype(dtype), dtype)


def bound(*expressions) -> tuple[Bindings, list]:
    """(the bindings of a function of these expressions, the variables that have them)."""
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            variables = [builder.emit(x) for x in expressions]
            output = builder.emit_output(relax.Tuple(variables))
        builder.emit_func_output(output)
    return Bindings(builder.finalize()["main"]), variables


NUMBERS = constant([[3, -7, 0, 5], [2**62, -1, 4, -(2**63)]])
OTHERS = constant([[2, -7, 1, -5], [2**62, 3, 0, -1]])
TRUTHS, FALSE = constant([[1, 0, 1, 0], [0, 0, 1, 1]], "bool"), constant(0, "bool")
FLOATS = constant([[0.5, -np.inf, np.nan, -0.0], [1e-40, 3.0, np.inf, 2.0]], "float32")
PLACES = constant([1, 0, 1])
EXPRESSIONS = {
    **{
        f"{name}_{dtype}": getattr(op, name)(op.astype(NUMBERS, dtype), op.astype(OTHERS, dtype))
        for name in ("add", "subtract", "multiply", "minimum", "maximum", "less", "less_equal", "greater", "equal")
        for dtype in ("int64", "int32", "int8")
    },
    "abs": op.abs(NUMBERS),
    "negative": op.negative(NUMBERS),
    "not_equal": op.not_equal(NUMBERS, OTHERS),
    "logical_and": op.logical_and(TRUTHS, FALSE),
    "logical_or": op.logical_or(TRUTHS, FALSE),
    "logical_not": op.logical_not(TRUTHS),
    "bitwise_and": op.bitwise_and(TRUTHS, FALSE),
    "where": op.where(TRUTHS, FLOATS, constant(-np.inf, "float32")),
    "arange": op.arange(-4, 5, 2, "int64"),
    "slices": op.strided_slice(NUMBERS, [-1, 0], [1, -2], [9, 2], [2, 1]),
    "slices_without_steps": op.strided_slice(FLOATS, [1], [-3], [-1]),
    "concat": op.concat([NUMBERS, OTHERS], -1),
    "permute_dims": op.permute_dims(FLOATS),
    "permute_dims_by_axes": op.permute_dims(op.expand_dims(FLOATS, [0]), [2, 0, 1]),
    "reshape": op.reshape(FLOATS, (4, 2)),
    "expand_dims": op.expand_dims(NUMBERS, [0, 2]),
    "squeeze": op.squeeze(op.expand_dims(NUMBERS, [0])),
    "flatten": op.flatten(NUMBERS),
    "broadcast_to": op.broadcast_to(TRUTHS, (3, 2, 4)),
    "take": op.take(FLOATS, PLACES, axis=0, mode="nan"),
    "take_last": op.take(FLOATS, PLACES, axis=-1, mode="clip"),
    "gather_elements": op.gather_elements(FLOATS, constant([[3, 0, 1]]), axis=1),
    "gather_rows": op.gather_elements(NUMBERS, constant([[1, 0, 1], [0, 0, 1], [1, 1, 1]]), axis=0),
    "astype": op.astype(NUMBERS, "int32"),
    "astype_bool": op.astype(NUMBERS, "bool"),
    "astype_of_bool": op.astype(TRUTHS, "int64"),
    "cumsum": op.cumsum(OTHERS, axis=-1),
    "cumsum_of_all": op.cumsum(OTHERS),
}


@pytest.fixture(scope="module")
def results():
    """name -> (what NumPy gives, what a compiled program gives)."""
    bindings, variables = bound(*EXPRESSIONS.values())
    exact = ExactValues(bindings, LARGEST)
    computed = _run(_program(bindings, variables))
    return {name: (exact.of(var), array) for name, var, array in zip(EXPRESSIONS, variables, computed)}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_results_are_those_of_compiled_programs(results, name):
    found, compiled = results[name]
    assert (found.dtype, found.shape) == (compiled.dtype, compiled.shape)
    assert found.tobytes() == compiled.tobytes()


@pytest.mark.parametrize(
    "expression",
    [
        op.add(FLOATS, FLOATS),
        op.not_equal(FLOATS, FLOATS),
        op.cos(FLOATS),
        op.maximum(FLOATS, FLOATS),
        op.floor_divide(NUMBERS, OTHERS),
        op.astype(FLOATS, "int64"),
        op.astype(NUMBERS, "float32"),
        op.take(FLOATS, constant([2]), axis=0, mode="nan"),
        op.take(FLOATS, constant([-1]), axis=0, mode="clip"),
        op.gather_elements(FLOATS, constant([[-1]]), axis=1),
        op.cumsum(OTHERS, axis=-1, exclusive=True),
        op.arange(0.0, 1.0, 0.5, "float32"),
        op.matmul(NUMBERS, op.permute_dims(OTHERS)),
        op.greater_equal(op.astype(NUMBERS, "int16"), op.astype(OTHERS, "uint32")),
    ],
    ids=lambda call: call.op.name,
)
def test_results_that_may_differ_are_left_to_programs(expression):
    bindings, (var,) = bound(expression)
    assert ExactValues(bindings, LARGEST).of(var) is None


def test_what_reads_an_unknown_result_is_unknown():
    bindings, (_, shown) = bound(cosine := op.astype(op.cos(FLOATS), "int64"), op.greater(cosine, NUMBERS))
    assert ExactValues(bindings, LARGEST).of(shown) is None


def test_large_results_are_left_to_programs():
    bindings, (var,) = bound(op.broadcast_to(TRUTHS, (3, 2, 4)))
    assert ExactValues(bindings, 23).of(var) is None and ExactValues(bindings, 24).of(var) is not None


def test_equal_expressions_share_one_array():
    bindings, (first, second, other) = bound(
        *(op.less(op.arange(0, 9, 1, "int64"), constant(number)) for number in (4, 4, 5))
    )
    exact = ExactValues(bindings, LARGEST)
    assert exact.of(first) is exact.of(second) is not exact.of(other)


def test_long_chains_need_no_recursion():
    builder, var = relax.BlockBuilder(), constant([0, 1])
    with builder.function("main", []):
        with builder.dataflow():
            for _ in range(3000):
                var = builder.emit(op.add(var, constant(1)))
            output = builder.emit_output(var)
        builder.emit_func_output(output)
    bindings = Bindings(builder.finalize()["main"])
    assert ExactValues(bindings, LARGEST).of(output).tolist() == [3000, 3001]


def test_arrays_are_no_memory_of_a_weight():
    """The caller of closed_values may keep what it gets longer than a file is mapped."""
    weight = constant(np.arange(8.0).reshape(2, 4), "float32")
    bindings, (var,) = bound(op.reshape(weight, (4, 2)))
    (array,) = closed_values(bindings, [var])
    assert not np.shares_memory(array, np.from_dlpack(weight.value)) and array.flags.writeable


def test_bfloat16_that_is_moved_becomes_float32():
    bindings, (var,) = bound(op.permute_dims(constant([[1.5, -2.0]], "bfloat16")))
    (array,) = closed_values(bindings, [var])
    assert array.dtype == np.float32 and array.tolist() == [[1.5], [-2.0]]
