"""Quotients of shifted numbers in indices: rewritten, of the same value, within their buffers in fused loops."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax, s_tir, te, tirx

import stof_tvm
from relax_passes.schedule.cpu import cpu_passes
from relax_passes.schedule.cuda import cuda_passes
from relax_passes.schedule.shifted_quotients import ShiftedQuotients
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.fusion.modules import gated_mlp, module_of, post_norm_layer, pre_norm_mlp
from tests.relax_passes.schedule.bounds import outside_accesses
from tir_kernels.errors import UnsupportedError
from tir_kernels.target import parse_target

ROWS = 16


def fused(size: int, columns: int, index) -> tvm.IRModule:
    """y[i, j] = x[index(j)] over one fused loop; x (size,), y (ROWS, columns)."""
    x = te.placeholder((size,), "float32", name="x")
    y = te.compute((ROWS, columns), lambda i, j: x[index(j)], name="y")
    schedule = s_tir.Schedule(te.create_prim_func([x, y]))
    schedule.fuse(*schedule.get_loops(schedule.get_sblock("y")))
    return tvm.IRModule({"main": schedule.mod["main"]})


INDICES = {
    "every second, from one": (24, lambda j: (j + 1) // 2),
    "every third": (24, lambda j: (j + 5) // 3),
    "from before": (24, lambda j: (2 * j + 48 - 5) // 4),
    "of a sum": (24, lambda j: (3 * (j + 1) + j % 5 + 2) // 4),
    "reversed": (24, lambda j: (j * -2 + 47) // 4),
    "reversed, whole": (8, lambda j: (j * -2 + 15) // 16),
    "reversed, both parts": (24, lambda j: (j * -2 + 47) // 16 * 16 + (j * -2 + 47) % 16),
    "reversed pairs": (24, lambda j: (j * -1 + 1) % 16 // 2),
    "reversed pairs of rows": (24, lambda j: (j // 2 * 4 + j * -1 + 3) % 16 // 2),
    "reversed, a remainder": (24, lambda j: (j * -3 + 47) % 10),
    "reversed beside rows": (18, lambda j: (j // 3 * 3 + j % 3 * -1 + 2) // 3),
    "reversed beside parts": (24, lambda j: (j % 4 + j // 4 * -2 + 10) // 3),
    "reversed steeply": (24, lambda j: (j % 4 + j // 4 * -7 + 36) // 3),
    "halves of heads": (8, lambda j: (j // 2 + 34) % 36 // 9),
    "a window": (12, lambda j: (j // 2 * 4 + j % 2 + 3) // 2),
}


@pytest.mark.parametrize("name", INDICES)
def test_the_same_elements_within_bounds(name):
    columns, index = INDICES[name]
    expected = [index(j) for j in range(columns)]
    size = max(expected) + 1
    div = lambda j: index(_Floor(j)).value
    mod = ShiftedQuotients()(fused(size, columns, div))
    assert outside_accesses(mod) == []
    x = np.random.default_rng(0).standard_normal(size).astype("float32")
    y = tvm.runtime.tensor(np.zeros((ROWS, columns), "float32"))
    tvm.compile(mod, target=QUICK_LLVM)["main"](tvm.runtime.tensor(x), y)
    np.testing.assert_array_equal(y.numpy(), np.tile(x[expected], (ROWS, 1)))


class _Floor:
    """An index with Python's operators, which are floor division and modulo."""

    def __init__(self, value):
        self.value = value

    def _with(self, operator, other):
        return _Floor(operator(self.value, other.value if isinstance(other, _Floor) else other))

    def __add__(self, other):
        return self._with(lambda a, b: a + b, other)

    def __sub__(self, other):
        return self._with(lambda a, b: a - b, other)

    def __mul__(self, other):
        return self._with(lambda a, b: a * b, other)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other):
        return self._with(tirx.floordiv, other)

    def __mod__(self, other):
        return self._with(tirx.floormod, other)


class Shifts(torch.nn.Module):
    """(B, S, L), whose rows are shifted as Transformer-XL does it, again and again."""

    def __init__(self, rounds: int):
        super().__init__()
        self.rounds = rounds

    def forward(self, x):
        for _ in range(self.rounds):
            b, s, n = x.shape
            x = x.reshape(b, n, s)[:, 2:].reshape(b, s, n - 2)
        return x * 2


def test_a_chain_of_shifts_is_right():
    x = torch.randn(2, 6, 22)
    engine = stof_tvm.build(Shifts(8), QUICK_LLVM, (x,), verify=False)
    assert torch.equal(engine(x), Shifts(8)(x))


REPEATED = {
    "repeated, tiled, cut": lambda x: x.repeat_interleave(2, 2).repeat(1, 2, 1)[:, 1:3],
    "tiled, cut, repeated": lambda x: x.repeat(1, 2, 1)[:, 1:3].repeat_interleave(2, 2),
    "tiled, cut, expanded": lambda x: x.repeat(1, 2, 1)[:, 1:3].reshape(2, 2, 3, 1).expand(2, 2, 3, 2).reshape(2, 2, 6),
    "cut twice": lambda x: x.repeat_interleave(2, 2).repeat(2, 2, 1)[1:3, 1:3],
    "expanded": lambda x: x.repeat_interleave(2, 2)[:, None].expand(2, 2, 2, 6).reshape(2, 4, 6)[:, 1:3],
    "rolled": lambda x: x.reshape(2, 6).repeat(1, 2).roll(2, 1).expand(3, 2, 12) + 0,
}


@pytest.mark.parametrize("name", REPEATED)
def test_cuts_of_repeated_tensors_are_exact(name):
    class Model(torch.nn.Module):
        def forward(self, x):
            return REPEATED[name](x)

    x = torch.arange(12.0).reshape(2, 2, 3)
    engine = stof_tvm.build(Model(), QUICK_LLVM, (x,), tuning_logs=False)
    assert torch.equal(engine(x), Model()(x))


def test_an_index_without_end_is_refused():
    with pytest.raises(UnsupportedError, match="more than 800 quotients"):
        ShiftedQuotients()(fused(900, 24, lambda j: sum((tirx.floordiv(j + c, 7) for c in range(800)), j) // 60))


def test_what_tvm_simplifies_soundly_stays():
    mod = fused(16, 24, lambda j: tirx.floordiv(j + 4, 2))
    tvm.ir.assert_structural_equal(ShiftedQuotients()(mod), mod)


def test_the_bounds_are_checked():
    """Without the pass the same index goes wrong: at the end of each row it is that of the first element."""
    outside = fused(12, 24, lambda j: tirx.floordiv(j + 4, 2))
    assert len(outside_accesses(outside)) == 1 and "from 2 to 13 of 12" in outside_accesses(outside)[0]
    guarded = fused(12, 24, lambda j: tirx.max(tirx.min(tirx.floordiv(j + 4, 2), 11), 0))
    assert outside_accesses(guarded) == []


def interleaved() -> tvm.IRModule:
    """out[:, 0::2] = x, out[:, 1::2] = y as a scatter of slices, which the schedules fuse with what follows."""
    x, y = (relax.Var(name, relax.TensorType((8, 4, 3), "float32")) for name in "xy")

    def spread(x, y):
        half = lambda j: tirx.floordiv(j + 1, 2)
        even = lambda a, b, j: tirx.if_then_else(tirx.floormod(j, 2) == 0, x[a, b, half(j)], y[a, b, half(j) - 1])
        return te.compute((8, 4, 6), even, name="spread")

    def body(builder):
        return builder.emit(relax.op.nn.relu(builder.emit(builder.call_te(spread, x, y))))

    return module_of([x, y], body)


@pytest.mark.parametrize("kind", ["llvm", "cuda"])
@pytest.mark.parametrize("make", [interleaved, post_norm_layer, pre_norm_mlp, gated_mlp])
def test_what_the_schedules_give_stays_within_its_buffers(make, kind):
    target = QUICK_LLVM if kind == "llvm" else parse_target("cuda -arch=sm_80")
    passes = (cpu_passes if kind == "llvm" else cuda_passes)(target)
    with target:
        mod = tvm.transform.Sequential(passes)(make())
    assert outside_accesses(mod) == []
