import json
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relax_passes.attention.canonicalize_attention import NOT_REWRITTEN
from relax_passes.attention.composite import emit_attention
from relax_passes.attention.fold_masks import NOTES
from relax_passes.attention.rewrite_masked_attention import SITES, RewriteMaskedAttention
from tir_kernels.attention.cpu import block_wise as block_wise_cpu
from tir_kernels.attention.problem import AttentionProblem, Layouts
from tir_kernels.attention.select import choose
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target

TARGET = parse_target("llvm")
B, H, S, D = 1, 2, 96, 16


@dataclass(frozen=True, eq=False)
class DenseMask:
    """The least that the pass needs of a mask."""

    keep: np.ndarray

    def compile(self, q_len, kv_len, block, token_stride=1):
        assert self.keep.shape[-2:] == (q_len, kv_len)
        return BlockSparseMask.from_dense(self.keep, block)


WINDOW = DenseMask(np.abs(np.subtract.outer(np.arange(S), np.arange(S))) <= 5)


def attention_module(swapped=False, length=S, heads=H, dtype="float32", **attention):
    """main(q, k, v) with one composite call; `swapped` puts the transposes of a projection around it."""
    builder = relax.BlockBuilder()
    shape = (B, length, heads, D) if swapped else (B, heads, length, D)
    params = [relax.Var(name, relax.TensorType(shape, dtype)) for name in "qkv"]
    with builder.function("main", params):
        with builder.dataflow():
            operands = [builder.emit(relax.op.permute_dims(x, [0, 2, 1, 3])) if swapped else x for x in params]
            out = emit_attention(builder, *operands, site="layer.0", spelling="sdpa", **attention)
            if swapped:
                out = builder.emit(relax.op.permute_dims(out, [0, 2, 1, 3]))
            out = builder.emit_output(out)
        builder.emit_func_output(out)
    return builder.finalize()


def rewrite(mod, site_mask=lambda site: WINDOW):
    mod = RewriteMaskedAttention(TARGET, site_mask)(mod)
    return tidy(mod)


def tidy(mod):
    """Without the names that a rewrite leaves for what it replaced."""
    return tvm.transform.Sequential([relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()])(
        mod
    )


def expected_module(layouts, mask=WINDOW):
    """What the pass must produce: call_tir of the chosen kernel on q, k, v and the mask's constants, nothing else."""
    problem = AttentionProblem(B, H, H, S, S, D, D, "float32", D**-0.5, layouts=layouts)
    choice = choose(problem, mask, TARGET)
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType(problem.shape(name), "float32")) for name in "qkv"]
    with builder.function("main", params):
        with builder.dataflow():
            with quick_script():
                kernel = choice.template.instantiate(problem, choice.config, TARGET).without_attr("global_symbol")
            name = "sparse_attention_" + choice.template.NAME.replace("-", "_")
            constants = [relax.const(a, str(a.dtype)) for a in choice.operands(TARGET).arrays]
            out_type = relax.TensorType(problem.shape("out"), "float32")
            out = builder.emit_output(relax.call_tir(builder.add_func(kernel, name), [*params, *constants], out_type))
        builder.emit_func_output(out)
    return tidy(builder.finalize())


@pytest.mark.parametrize("swapped", [False, True], ids=["bhsd", "bshd"])
def test_composite_becomes_call_tir_with_bsr_constants(swapped):
    actual = rewrite(attention_module(swapped))
    layouts = Layouts(*["bshd" if swapped else "bhsd"] * 4)
    tvm.ir.assert_structural_equal(actual.without_attr(SITES), expected_module(layouts))


def test_the_site_is_described():
    (site,) = json.loads(rewrite(attention_module()).attrs[SITES])
    assert site["rewritten"] and site["site"] == "layer.0" and site["spelling"] == "sdpa"
    assert site["density"] == pytest.approx(WINDOW.keep.mean())
    assert 0 < site["block_density"] <= 1
    assert site["shape"]["q_len"] == S


def test_the_chooser_sees_the_models_own_masks():
    keep = np.random.default_rng(0).random((1, 1, S, S)) < 0.3
    seen = []

    def site_mask(site):
        seen.append(site)
        return DenseMask(site.constant & np.tri(S, dtype=bool))

    rewrite(attention_module(mask=relax.const(keep), causal="top-left"), site_mask)
    (site,) = seen
    assert site.path == "layer.0" and site.causal == "top-left"
    np.testing.assert_array_equal(site.constant, keep)


def test_equal_sites_share_kernel_and_constants():
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType((B, H, S, D), "float32")) for name in "qkv"]
    with builder.function("main", params):
        with builder.dataflow():
            first = emit_attention(builder, *params, site="layer.0")
            second = emit_attention(builder, first, *params[1:], site="layer.1")
            out = builder.emit_output(second)
        builder.emit_func_output(out)
    mod = rewrite(builder.finalize())
    kernels = [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    assert len(kernels) == 1
    calls = [b.value for b in mod["main"].body.blocks[0].bindings]
    first_constants, second_constants = (list(call.args[1])[3:] for call in calls[:2])
    assert first_constants and all(a.same_as(b) for a, b in zip(first_constants, second_constants, strict=True))


@pytest.mark.parametrize("kept", [False, True], ids=["output also read unswapped", "only swapped"])
def test_the_output_layout_follows_its_readers(kept):
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType((B, H, S, D), "float32")) for name in "qkv"]
    with builder.function("main", params):
        with builder.dataflow():
            out = emit_attention(builder, *params, site="layer.0")
            swapped = builder.emit(relax.op.permute_dims(out, [0, 2, 1, 3]))
            result = swapped if kept else relax.Tuple([swapped, out])
            result = builder.emit_output(result)
        builder.emit_func_output(result)
    (site,) = json.loads(rewrite(builder.finalize()).attrs[SITES])
    assert site["layouts"][3] == ("bshd" if kept else "bhsd")


@pytest.mark.parametrize("case", ["back again", "heads join rows", "one of them is read, too"])
def test_reshapes_between_an_output_and_its_readers(case):
    """Batch and heads are one for a while, as where a model multiplies three-dimensional matrices."""
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType((B, H, S, D), "float32")) for name in "qkv"]
    with builder.function("main", params):
        with builder.dataflow():
            out = emit_attention(builder, *params, site="layer.0")
            flat = builder.emit(relax.op.reshape(out, (B * H, S, D)))
            split = (B, H, S, D) if case != "heads join rows" else (B, H * S, 1, D)
            back = builder.emit(relax.op.reshape(flat, split))
            swapped = builder.emit(relax.op.permute_dims(back, [0, 2, 1, 3]))
            result = relax.Tuple([swapped, flat]) if case == "one of them is read, too" else swapped
            result = builder.emit_output(result)
        builder.emit_func_output(result)
    mod = rewrite(builder.finalize())
    (site,) = json.loads(mod.attrs[SITES])
    assert site["layouts"][3] == ("bshd" if case == "back again" else "bhsd")
    mod = relax.transform.DeadCodeElimination()(mod)
    names = [b.value.op.name for b in mod["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    assert ("relax.permute_dims" in names) == (case != "back again")


@pytest.mark.parametrize("swapped", [False, True], ids=["bhsd", "bshd"])
def test_a_call_bound_straight_to_the_output(swapped):
    """Its variable leaves the dataflow block, so what replaces it must too."""
    mod = relax.transform.CanonicalizeBindings()(attention_module(swapped))
    (site,) = json.loads(rewrite(mod).attrs[SITES])
    assert site["rewritten"]


def test_what_earlier_passes_recorded_is_told():
    mod = attention_module().with_attr(NOT_REWRITTEN, [["head", "its weights are returned"]])
    rewritten, refused = json.loads(rewrite(mod.with_attr(NOTES, [["layer.0", "rows average"]])).attrs[SITES])
    assert "rows average" in rewritten["notes"]
    assert (refused["site"], refused["spelling"], refused["rewritten"]) == ("head", "softmax", False)
    assert refused["reason"] == "its weights are returned"


def unchanged(mod, reason, site_mask=lambda site: WINDOW):
    """The module comes back as it was, and the site says why."""
    actual = RewriteMaskedAttention(TARGET, site_mask)(mod)
    (site,) = json.loads(actual.attrs[SITES])
    assert not site["rewritten"] and reason in site["reason"]
    assert site["density"] == site["block_density"] == 1, "all of it is computed"
    tvm.ir.assert_structural_equal(actual.without_attr(SITES), mod)


def test_rejects_a_symbolic_length():
    unchanged(attention_module(length=tirx.Var("n", "int64")), "symbolic shape")


def test_rejects_an_open_mask():
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType((B, H, S, D), "float32")) for name in "qkv"]
    mask = relax.Var("mask", relax.TensorType((1, 1, S, S), "bool"))
    with builder.function("main", [*params, mask]):
        with builder.dataflow():
            out = builder.emit_output(emit_attention(builder, *params, mask=mask))
        builder.emit_func_output(out)
    unchanged(builder.finalize(), "computed from the model's inputs")


def test_rejects_a_dtype_without_kernel():
    unchanged(attention_module(dtype="float64"), "float64")


def test_no_attention_no_change():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.add(x, x))
        builder.emit_func_output(out)
    mod = builder.finalize()
    actual = RewriteMaskedAttention(TARGET, lambda site: WINDOW)(mod)
    tvm.ir.assert_structural_equal(actual.without_attr(SITES), mod)
    assert json.loads(actual.attrs[SITES]) == []


def test_a_mask_that_keeps_nothing_is_an_error():
    with pytest.raises(MaskError, match="(?s)'layer.0'.*keeps nothing"):
        rewrite(attention_module(), lambda site: DenseMask(np.zeros((S, S), bool)))


def test_a_mask_for_other_heads_is_an_error():
    with pytest.raises(MaskError, match="'layer.0'.*does not broadcast"):
        rewrite(
            attention_module(), lambda site: DenseMask(np.ones((3, S, S), bool) & (np.arange(3) > 0)[:, None, None])
        )


def test_without_any_mask_the_kernel_still_replaces_the_dense_body():
    (site,) = json.loads(rewrite(attention_module(), lambda site: None).attrs[SITES])
    assert site["rewritten"] and site["density"] == 1.0 and "no static mask: nothing to skip" in site["notes"]


def test_the_chosen_kernel_is_one_of_the_targets():
    (site,) = json.loads(rewrite(attention_module()).attrs[SITES])
    assert site["kernel"] in (block_wise_cpu.NAME, "row-wise")
