"""The composite's dense body: what a site that no pass rewrites computes."""

import json

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.canonicalize_attention import CanonicalizeAttention
from relax_passes.attention.composite import emit_attention
from relax_passes.attention.fold_masks import FoldMasks
from relax_passes.attention.rewrite_masked_attention import SITES, RewriteMaskedAttention
from stof_tvm import masks
from tests.relax_passes.conftest import attention_calls
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.reference import attention_reference
from tir_kernels.target import parse_target

B, H, HKV, S, D = 2, 4, 2, 7, 8
SINK = np.array([0.5, 200.0, -np.inf, 3e38], np.float32)


def module(sink_dtype="float32", **given):
    """main(q, k, v, sink[, bias]) with one composite call."""
    builder = relax.BlockBuilder()
    shapes = {"q": (B, H, S, D), "k": (B, HKV, S, D), "v": (B, HKV, S, D)}
    params = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    params.append(relax.Var("sink", relax.TensorType((H,), sink_dtype)))
    with builder.function("main", params):
        with builder.dataflow():
            *qkv, sink = params
            out = builder.emit_output(emit_attention(builder, *qkv, sink=sink, site="layer.0", **given))
        builder.emit_func_output(out)
    return builder.finalize()


def run(mod, *inputs) -> torch.Tensor:
    return relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())["main"](*inputs)


def operands():
    rng = np.random.default_rng(0)
    shapes = [(B, H, S, D), (B, HKV, S, D), (B, HKV, S, D)]
    return [torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]


@pytest.mark.parametrize("masked, dtype", [(False, "float32"), (True, "float32"), (True, "float16")])
def test_a_sink_takes_its_share_of_every_row(masked, dtype):
    keep = np.random.default_rng(1).random((1, 1, S, S)) < 0.5
    keep[..., 3, :] = False
    mod = module(dtype, scale=0.5, **({"mask": relax.const(keep)} if masked else {"causal": "top-left"}))
    sink = SINK if dtype == "float32" else np.minimum(SINK, 6e4).astype(dtype)
    out = run(mod, *operands(), torch.from_numpy(sink))
    problem = AttentionProblem(B, H, HKV, S, S, D, D, "float32", 0.5, sink_dtype=dtype)
    expected = attention_reference(problem, *operands(), keep if masked else np.tri(S, dtype=bool), sink=sink)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert not out[:, 1].any() and out[:, 0].any(dim=-1).sum() == B * (S - masked)


def test_a_sink_of_nan_makes_its_head_nan():
    out = run(module(), *operands(), torch.tensor([0.0, torch.nan, 0.0, 0.0]))
    assert out[:, 1].isnan().all() and out[:, [0, 2, 3]].isfinite().all()


def test_a_kernel_takes_the_sink():
    target = parse_target("llvm")
    mod = RewriteMaskedAttention(target, lambda site: masks.causal(site.causal))(module(causal="top-left", scale=0.5))
    (site,) = json.loads(mod.attrs[SITES])
    assert site["rewritten"] and "a sink in each head's softmax" in site["notes"]
    mod = relax.transform.DeadCodeElimination()(mod)
    out = run(mod, *operands(), torch.from_numpy(SINK))
    problem = AttentionProblem(B, H, HKV, S, S, D, D, "float32", 0.5, sink_dtype="float32")
    expected = attention_reference(problem, *operands(), np.tri(S, dtype=bool), sink=SINK)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_the_passes_keep_the_sink():
    """Over repeated heads, which a pass takes out, and a mask that another one folds."""
    builder = relax.BlockBuilder()
    shapes = (B, H, S, D), (B, HKV, S, D), (B, HKV, S, D), (H,)
    params = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in zip(("q", "k", "v", "s"), shapes)]
    q, k, v, sink = params
    op, emit = relax.op, builder.emit
    with builder.function("main", params):
        with builder.dataflow():
            k, v = (emit(op.repeat(x, H // HKV, axis=1)) for x in (k, v))
            columns = emit(op.arange(0, S, 1, "int64"))
            mask = emit(op.reshape(emit(op.less_equal(columns, emit(op.expand_dims(columns, 1)))), (1, 1, S, S)))
            out = builder.emit_output(emit_attention(builder, q, k, v, mask=mask, sink=sink, scale=0.5, site="a"))
        builder.emit_func_output(out)
    mod = builder.finalize()
    (call,) = attention_calls(tvm.transform.Sequential([CanonicalizeAttention(), FoldMasks()])(mod)).values()
    assert int(call.k.ty.shape[1]) == HKV and isinstance(call.mask, GenericConst)
    assert call.sink is not None and call.bias is None
    assert [str(name) for name in call.function.attrs["stof.operands"]] == ["mask", "sink"]


@pytest.mark.parametrize("rewritten", [False, True], ids=["dense", "kernel"])
def test_a_softcap_bounds_the_scores(rewritten):
    """A negative scale moves into q."""
    mod = module(causal="top-left", scale=-1.5, softcap=0.75)
    (call,) = attention_calls(mod).values()
    assert (call.scale, call.softcap) == (1.5, 0.75)
    if rewritten:
        mod = RewriteMaskedAttention(parse_target("llvm"), lambda site: masks.causal(site.causal))(mod)
        (site,) = json.loads(mod.attrs[SITES])
        assert site["rewritten"] and "scores capped at 0.75 by tanh" in site["notes"]
        mod = relax.transform.DeadCodeElimination()(mod)
    problem = AttentionProblem(B, H, HKV, S, S, D, D, "float32", -1.5, sink_dtype="float32", softcap=0.75)
    expected = attention_reference(problem, *operands(), np.tri(S, dtype=bool), sink=SINK)
    np.testing.assert_allclose(run(mod, *operands(), torch.from_numpy(SINK)), expected, atol=1e-5)
