"""Index maps of views against NumPy, element by element, for random shapes with ones among them."""

import itertools
import math

import numpy as np
import pytest
import tvm
from tvm import tirx

from tir_kernels.fusion.group.indices import broadcast, flatten, of_view, reshape, unflatten
from tir_kernels.fusion.group.problem import Value
from tir_kernels.fusion.group.symbols import Symbols, depends, substitute

SEEDS = range(8)


def evaluate(expressions, variables, numbers) -> tuple[int, ...]:
    """Expressions of variables at numbers."""
    values = {var: tirx.IntImm("int32", int(n)) for var, n in zip(variables, numbers)}
    analyzer = tvm.sym.Analyzer()
    found = [substitute(e, values) if isinstance(e, tvm.ir.Expr) else e for e in expressions]
    return tuple(int(e) if isinstance(e, int) else int(analyzer.simplify(e)) for e in found)


def assert_maps(view: np.ndarray, source: np.ndarray, to_source) -> None:
    """`to_source(indices)` leads from each place of a view to the same element of its source."""
    variables = [tirx.Var(f"i{axis}", "int32") for axis in range(view.ndim)]
    indices = to_source(variables)
    assert len(indices) == source.ndim
    for place in itertools.product(*map(range, view.shape)):
        assert source[evaluate(indices, variables, place)] == view[place]


def numbered(*shape) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def random_shape(rng, total=None) -> tuple[int, ...]:
    """A shape with ones; of `total` elements if given."""
    if total is None:
        return tuple(int(n) for n in rng.choice([1, 1, 2, 3, 4], rng.integers(1, 5)))
    shape = []
    while total > 1 and rng.random() < 0.7:
        factor = int(rng.choice([n for n in range(1, total + 1) if total % n == 0]))
        shape.append(factor)
        total //= factor
    return (*shape, total, *[1] * int(rng.integers(0, 2)))


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape(seed):
    rng = np.random.default_rng(seed)
    source = numbered(*random_shape(rng))
    shape = random_shape(rng, source.size)
    assert_maps(source.reshape(shape), source, lambda indices: reshape(indices, shape, source.shape))


@pytest.mark.parametrize("shape, source", [((), (1, 1)), ((1, 1), ()), ((6,), (1, 2, 1, 3, 1)), ((2, 3), (3, 2))])
def test_reshape_of_few_elements(shape, source):
    x = numbered(*source)
    assert_maps(x.reshape(shape), x, lambda indices: reshape(indices, shape, source))


def test_reshape_leaves_indices_that_pass_through():
    i, j, k = (tirx.Var(name, "int32") for name in "ijk")
    first, second, third, last = reshape([i, j, k], (5, 12, 7), (5, 3, 4, 7))
    assert first.same_as(i) and last.same_as(k)
    assert depends(second, j) and depends(third, j) and not depends(second, k)


@pytest.mark.parametrize("seed", SEEDS)
def test_flatten_and_unflatten(seed):
    shape = random_shape(np.random.default_rng(seed))
    flat = numbered(math.prod(shape))
    assert_maps(flat.reshape(shape), flat, lambda indices: [flatten(indices, shape)])
    assert_maps(flat, flat.reshape(shape), lambda indices: unflatten(indices[0], shape))


@pytest.mark.parametrize("shape, wanted", [((3, 1), (2, 3, 4)), ((1,), (2, 3)), ((), (2,)), ((2, 3), (2, 3))])
def test_broadcast(shape, wanted):
    x = numbered(*shape)
    assert_maps(np.broadcast_to(x, wanted), x, lambda indices: broadcast(indices, shape))
    view = Value("broadcast", (0,), wanted, "float16")
    assert_maps(np.broadcast_to(x, wanted), x, lambda indices: of_view(view, indices, shape))


X = numbered(4, 5, 6)


@pytest.mark.parametrize(
    "operator, numbers, view",
    [
        ("reshape", (), X.reshape(20, 2, 3)),
        ("permute", (2, 0, 1), X.transpose(2, 0, 1)),
        ("slice", (1, 1, 0, 2, 5, 1), X[1:3, ::2, 5:]),
        ("take", (1, 0, 2, 1), np.stack([X[:, 0:3], X[:, 2:5]], 1)),
        ("roll", (2, 4), np.roll(X, -4, 2)),
        ("roll", (0, 3), np.roll(X, -3, 0)),
    ],
)
def test_views(operator, numbers, view):
    value = Value(operator, (0,), view.shape, "float16", numbers)
    assert_maps(view, X, lambda indices: of_view(value, indices, X.shape))


def test_indices_of_a_pad_may_lie_outside():
    value = Value("pad", (0,), (6, 5, 9), "float16", (0.0, 2, 0, 1))
    variables = [tirx.Var(name, "int32") for name in "ijk"]
    indices = of_view(value, variables, X.shape)
    assert evaluate(indices, variables, (0, 3, 8)) == (-2, 3, 7)
    assert evaluate(indices, variables, (2, 0, 1)) == (0, 0, 0)


def test_what_symbols_know():
    symbols = Symbols()
    row, vector = symbols.new("row", 5), symbols.new("vector", 3)
    position = row * 24 + vector * 8 + symbols.lane
    first = symbols.first_of_neighbours(position)
    assert first is not None and symbols.is_multiple(first, 8)
    assert not symbols.is_multiple(symbols.first_of_neighbours(position + 4), 8)
    assert symbols.first_of_neighbours(position * 2) is None and symbols.first_of_neighbours(row) is None
    assert symbols.is_known(position < 120) and not symbols.is_known(position < 119)
    assert depends(position, symbols.lane) and not depends(first, symbols.lane)
    symbols.registers[row] = tirx.IntImm("int32", 2)
    symbols.registers[vector] = tirx.IntImm("int32", 1)
    assert int(tvm.sym.Analyzer().simplify(symbols.in_registers(position, 3))) == 2 * 24 + 8 + 3
