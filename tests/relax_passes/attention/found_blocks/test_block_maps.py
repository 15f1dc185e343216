"""The function of a rule in a module: added once, called with q and k, inlined, its map the kernel's operand."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.attention.composite import emit_attention
from relax_passes.attention.found_blocks.results import kept_in_blocks
from relax_passes.attention.rewrite_masked_attention import RewriteMaskedAttention
from relax_passes.ir.bindings import operator, shape_of
from relax_passes.report_rows import site_rows
from tir_kernels.attention.problem import AttentionProblem, BlockMap
from tir_kernels.errors import UnsupportedError
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target

LLVM = parse_target("llvm")
B, H, S, D = 1, 2, 96, 16


@dataclass(frozen=True, eq=False)
class DenseMask:
    """The least that the pass needs of a mask."""

    keep: np.ndarray

    def compile(self, q_len, kv_len, block, token_stride=1):
        return BlockSparseMask.from_dense(self.keep, block)


@dataclass
class FirstElements:
    """A rule that keeps blocks of 32 × 32 whose first query and key have a positive first element."""

    block: tuple[int, int] = (32, 32)
    known: dict = field(default_factory=dict)

    def __repr__(self):
        return "first_elements()"

    def traced(self, q_shape, k_shape, dtype):
        if (q_shape, k_shape, dtype) in self.known:
            return self.known[q_shape, k_shape, dtype]
        builder, op = relax.BlockBuilder(), relax.op
        params = [relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in (("q", q_shape), ("k", k_shape))]
        with builder.function("main", params):
            with builder.dataflow():
                q, k = (
                    builder.emit(op.strided_slice(x, [2, 3], [0, 0], [int(x.ty.shape[2]), 1], [32, 1])) for x in params
                )
                product = builder.emit(op.matmul(q, builder.emit(op.permute_dims(k, [0, 1, 3, 2]))))
                found = builder.emit(op.greater(product, relax.const(0, dtype)))
                out = builder.emit_output(relax.Tuple([found]))
            builder.emit_func_output(out)
        self.known[q_shape, k_shape, dtype] = builder.finalize()
        return self.known[q_shape, k_shape, dtype]


def rewritten(scales=(None,), **attention):
    """main(q, k, v) with an attention for each scale, one after another, after the pass."""
    builder, rule = relax.BlockBuilder(), FirstElements()
    params = [relax.Var(name, relax.TensorType((B, H, S, D), "float32")) for name in "qkv"]
    with builder.function("main", params):
        with builder.dataflow():
            q, k, v = params
            for number, scale in enumerate(scales):
                q = emit_attention(builder, q, k, v, scale=scale, site=f"layer.{number}", **attention)
            out = builder.emit_output(relax.Tuple([q]))
        builder.emit_func_output(out)
    mod = builder.finalize()
    causal = DenseMask(np.tri(S, dtype=bool))
    return RewriteMaskedAttention(LLVM, lambda site: causal, rule_for=lambda path: rule)(mod)


def calls(mod):
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    rules = [x for x in values if isinstance(x, relax.Call) and isinstance(x.op, tvm.ir.GlobalVar)]
    return values, rules, [x for x in values if operator(x) == "call_tir"]


def test_the_map_is_an_operand_and_a_result():
    mod = rewritten()
    _, (rule,), (kernel,) = calls(mod)
    assert [x.name for x in rule.args] == ["q", "k"]
    block_map = kernel.args[1].fields[3]
    assert shape_of(block_map) == (B, H, 3, 3) and block_map.ty.dtype == "bool"
    fields = mod["main"].ret_ty.fields
    assert [(shape_of_type(x), str(x.dtype)) for x in fields[1:]] == [((), "float32"), ((B, H, 3, 3), "bool")]
    (row,) = site_rows(mod)
    assert (row.rule, row.block_map, row.returns_map) == ("first_elements()", (B, H, 3, 3), True)
    assert "found in each call by 2 kinds of operators (matmul, greater)" in row.notes[-1]


def shape_of_type(ty):
    return tuple(int(n) for n in ty.shape)


def test_only_another_scale_is_in_q():
    mod = rewritten((None, 1 / D**0.5 * (1 + 1e-9), 0.5))
    values, rules, _ = calls(mod)
    assert len({x.op for x in rules}) == 1  # one function for all
    scaled = [x for x in values if operator(x) == "multiply" and shape_of(x) == (B, H, S, D)]
    assert [float(x.args[1].value.numpy()) for x in scaled] == [pytest.approx(0.5 * D**0.5)]


def test_caches_are_refused():
    with pytest.raises(UnsupportedError, match="'layer.0' is over a cache.*first_elements"):
        rewritten(first_row=3)


@pytest.mark.parametrize("block", [(32, 32), (64, 96), (128, 64)])
def test_pairs_that_a_mask_keeps_in_blocks(block):
    random = np.random.default_rng(3)
    keep = random.random((2, 90, 70)) < 0.3
    keep[0, :64, :64], keep[1, 32:, :32] = True, False
    problem = AttentionProblem(3, 2, 2, 90, 70, D, D, "float32", 1.0, block_map=BlockMap(1, 1, *block))
    found = kept_in_blocks(DenseMask(keep), problem)
    m, n = block
    expected = [[[x[i : i + m, j : j + n].sum() for j in range(0, 70, n)] for i in range(0, 90, m)] for x in keep]
    assert np.array_equal(found, np.array(expected)[None])
    assert kept_in_blocks(None, problem).sum() == 90 * 70
