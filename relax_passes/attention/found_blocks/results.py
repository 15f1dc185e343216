"""What a program returns of the masks that it found, after its other results.

For each attention with a rule, in the order of the report: the share of pairs that it kept, float32 (), and the block
map, unless that is too large to be kept beside those of other attentions (`RewrittenRow.returns_map`).
"""

from collections.abc import Callable

import numpy as np
from tvm import relax

from relax_passes.ir.bindings import shape_of
from tir_kernels.attention.mask_forms import MaskLike, compile_mask
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.masks.bitmap import count_bits


def emit_density(emit: Callable, block_map: relax.Expr, kept: relax.Expr, pairs: int) -> relax.Call:
    """The share of the pairs that a map keeps, float32 (), as an expression that is not emitted yet.

    `block_map` is bool (B or 1, H or 1, query blocks, key blocks); `kept`, what `kept_in_blocks` gives, broadcasts.
    `pairs` are those of one batch entry and head.
    """
    op = relax.op
    counts = emit(op.where(block_map, emit(op.astype(kept, "int64")), relax.const(0, "int64")))
    count = emit(op.astype(emit(op.sum(counts)), "float32"))
    batch, heads = shape_of(counts)[:2]
    return op.multiply(count, relax.const(1 / (batch * heads * pairs), "float32"))


def kept_in_blocks(mask: MaskLike | None, problem: AttentionProblem) -> np.ndarray:
    """Int32 (1 or B, 1 or H, query blocks, key blocks): the pairs that a mask keeps in each block of a problem's map.

    A mask of None keeps everything.
    """
    assert problem.block_map is not None
    height, width = problem.block_map.block_m, problem.block_map.block_n
    stored = compile_mask(mask, problem, (height, width))
    kept = np.zeros((stored.n_patterns * stored.n_block_rows, stored.n_block_cols), np.int32)
    kept[_rows(stored.full_row_ptr), stored.full_col_idx] = height * width
    kept[_rows(stored.part_row_ptr), stored.part_col_idx] = count_bits(stored.bitmap)
    return kept.reshape(stored.n_patterns, stored.n_block_rows, -1)[stored.head_to_mask]


def _rows(row_ptr: np.ndarray) -> np.ndarray:
    """The row of each entry of lists that begin at `row_ptr`."""
    return np.repeat(np.arange(len(row_ptr) - 1), np.diff(row_ptr))


def with_results(function: relax.Function, results: list[relax.Var]) -> relax.Function:
    """A function of a tuple with more fields: variables of its body that can be read outside of dataflow blocks."""
    if not results:
        return function
    blocks, returned, binding = list(function.body.blocks), function.body.body, None
    if isinstance(returned, relax.Var):  # bound to the tuple in the last block
        *others, binding = blocks[-1].bindings
        assert binding.var == returned
        returned = binding.value
    assert isinstance(returned, relax.Tuple)
    normalized = relax.BlockBuilder().normalize
    returned = normalized(relax.Tuple([*returned.fields, *results]))
    if binding is not None:
        var = relax.Var(binding.var.name, returned.ty)
        blocks[-1] = type(blocks[-1])([*others, relax.VarBinding(var, returned)])
        returned = var
    body = normalized(relax.SeqExpr(blocks, returned))
    return relax.Function(function.params, body, body.ty, function.is_pure, function.attrs)
