"""Constants of mapped files are copied where compiled code reads them, and only where they are not aligned."""

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax

from relax_passes.ir.bindings import Bindings
from relax_passes.ir.constant_arrays import ALIGNMENT
from relax_passes.legalizations.closed_values import closed_values
from relax_passes.parallel.align_constants import AlignConstants


def module(offset: int) -> tuple[tvm.IRModule, torch.Tensor]:
    """x + 2 w, where w begins `offset` bytes after a boundary."""
    memory = torch.arange(256, dtype=torch.float32)
    start = (-memory.data_ptr() % ALIGNMENT + offset) // 4
    weight = memory[start : start + 8]
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((8,), "float32"))
    constant = relax.const(tvm_ffi.from_dlpack(weight, require_alignment=1))
    with builder.function("main", [x]):
        with builder.dataflow():
            twice = builder.emit(relax.op.add(constant, constant))
            out = builder.emit_output(relax.op.add(x, twice))
        builder.emit_func_output(out)
    return builder.finalize(), weight


def constant_of(mod):
    return mod["main"].body.blocks[0].bindings[0].value.args[0].value


@pytest.mark.parametrize("offset", [0, 4, 24])
def test_only_what_is_not_aligned_is_copied(offset):
    mod, weight = module(offset)
    assert constant_of(mod).data_ptr() % ALIGNMENT == offset
    after = AlignConstants()(mod)
    assert constant_of(after).data_ptr() % ALIGNMENT == 0
    assert (constant_of(after).data_ptr() == weight.data_ptr()) == (offset == 0)
    tvm.ir.assert_structural_equal(after, mod)


def test_values_are_computed_of_constants_that_are_not_aligned():
    mod, weight = module(24)
    twice = mod["main"].body.blocks[0].bindings[0].var
    (value,) = closed_values(Bindings(mod["main"]), [twice])
    np.testing.assert_array_equal(value, 2 * weight.numpy())
