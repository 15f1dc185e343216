"""Reshapes by axes of length 1 have no arithmetic in their indices; all others are TVM's own."""

import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax, tirx

from relax_passes.legalizations import LEGALIZATIONS
from relax_passes.schedule.cpu import cpu_passes
from tests.models.quick_llvm import QUICK_LLVM, run_linked
from tests.relax_passes.fusion.modules import module_of


def module(build, *shapes):
    """A module whose "main" is `build(builder, *parameters)`."""
    params = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    return module_of(params, lambda builder: build(builder, *params))


def reshaped(shape):
    return lambda _, x: relax.op.reshape(x, shape)


def has_quotients(mod) -> bool:
    text = mod.script()
    return "//" in text or "%" in text


@pytest.mark.parametrize(
    "before, after",
    [
        ((2, 3), (2, 3, 1)),
        ((2, 3), (1, 2, 1, 1, 3)),
        ((1, 2, 1, 3), (2, 3)),
        ((1, 1), (1,)),
        ((1,), (1, 1, 1)),
        ((5, 1, 4), (1, 5, 4, 1)),
    ],
    ids=str,
)
def test_an_axis_of_length_1_comes_or_goes(before, after):
    legal = relax.transform.LegalizeOps(LEGALIZATIONS)(module(reshaped(after), before))
    assert not has_quotients(legal)
    x = torch.randn(before, generator=torch.Generator().manual_seed(0))
    with QUICK_LLVM:
        mod = tvm.transform.Sequential(cpu_passes(QUICK_LLVM))(module(reshaped(after), before))
        machine = run_linked(tvm.compile(mod, target=QUICK_LLVM))
    assert torch.equal(torch.from_dlpack(machine["main"](tvm.runtime.from_dlpack(x))), x.reshape(after))


@pytest.mark.parametrize("before, after", [((2, 3), (3, 2)), ((2, 6), (2, 2, 3)), ((4, 1, 3), (12, 1))], ids=str)
def test_other_reshapes_are_tvms(before, after):
    mod = module(reshaped(after), before)
    expected = relax.transform.LegalizeOps()(mod)
    tvm.ir.assert_structural_equal(relax.transform.LegalizeOps(LEGALIZATIONS)(mod), expected)


def test_a_reshape_of_unknown_sizes_is_tvms():
    rows = tirx.Var("rows", "int64")
    mod = module(reshaped((rows, 3, 1)), (rows, 3))
    expected = relax.transform.LegalizeOps()(mod)
    tvm.ir.assert_structural_equal(relax.transform.LegalizeOps(LEGALIZATIONS)(mod), expected)


def test_halves_of_a_stack_are_read_without_arithmetic():
    """An interleaved rotary embedding: half a minute of simplification with flat indices."""

    def build(builder, x, cosines, sines):
        heads = builder.emit(relax.op.permute_dims(builder.emit(relax.op.reshape(x, (1, 200, 4, 8))), [0, 2, 1, 3]))
        even, odd = (builder.emit(relax.op.strided_slice(heads, [3], [first], [8], [2])) for first in (0, 1))
        products = [builder.emit(relax.op.multiply(*pair)) for pair in ((even, cosines), (odd, sines))]
        halves = [builder.emit(op(*products)) for op in (relax.op.subtract, relax.op.add)]
        columns = [builder.emit(relax.op.reshape(half, (1, 4, 200, 4, 1))) for half in halves]
        return relax.op.concat(columns, axis=4)

    mod = module(build, (1, 200, 32), (200, 4), (200, 4))
    with QUICK_LLVM:
        scheduled = tvm.transform.Sequential(cpu_passes(QUICK_LLVM))(mod)
        machine = run_linked(tvm.compile(scheduled, target=QUICK_LLVM))
    quotients: list = []
    for func in scheduled.functions.values():
        if isinstance(func, tirx.PrimFunc):
            tvm_ffi.structural_walk(func.body, ((tirx.FloorDiv, tirx.FloorMod), quotients.append), order="post")
    assert len(quotients) < 100, len(quotients)
    x, cosines, sines = (
        torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in ((1, 200, 32), (200, 4), (200, 4))
    )
    heads = x.reshape(1, 200, 4, 8).transpose(1, 2)
    pair = heads[..., ::2] * cosines, heads[..., 1::2] * sines
    expected = torch.stack([pair[0] - pair[1], pair[0] + pair[1]], -1)
    found = torch.from_dlpack(machine["main"](*map(tvm.runtime.from_dlpack, (x, cosines, sines))))
    torch.testing.assert_close(found, expected)
