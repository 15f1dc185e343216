"""Looking through bindings.  The passes' own tests show most of it."""

import pytest
from tvm import relax, tirx

from relax_passes.ir.bindings import Bindings, shape_of, static_shape
from tir_kernels.errors import UnsupportedError


def test_shapes_are_numbers():
    x = relax.Var("x", relax.TensorType([2, 3], "float32"))
    assert shape_of(x) == static_shape(x) == (2, 3)


@pytest.mark.parametrize("type_", [relax.TensorType([tirx.Var("n", "int64"), 3], "float32"), relax.TupleType([])])
def test_what_has_no_shape_of_numbers(type_):
    x = relax.Var("x", type_)
    assert static_shape(x) is None
    with pytest.raises(UnsupportedError, match="x has no shape of numbers"):
        shape_of(x)


def test_what_is_computed_from_a_variable():
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType([2], "float32")) for name in "xy")
    with builder.function("main", [x, y]):
        doubled = builder.emit(relax.op.add(x, x))
        other = builder.emit(relax.op.exp(y))
        total = builder.emit(relax.op.add(doubled, other))
        builder.emit_func_output(total)
    bindings = Bindings(builder.get()["main"])
    assert bindings.computed_from([x]) == {x, doubled, total}
    assert bindings.computed_from([y, doubled]) == {y, doubled, other, total}
    assert bindings.computed_from([]) == set()


def test_what_a_value_reads_is_the_objects_that_are_bound():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([2], "float32"))
    with builder.function("main", [x]):
        doubled = builder.emit(relax.op.add(x, x))
        builder.emit_func_output(builder.emit(relax.op.multiply(x, doubled)))
    bindings = Bindings(builder.get()["main"])
    first, second = bindings.values
    assert [*bindings.reads] == [first, second] == [doubled, *bindings.outputs]
    assert bindings.reads[second][1] is first and bindings.reads[first] == (x,)
    assert bindings.readers[x] == [first, second] and bindings.readers[first] == [second]
