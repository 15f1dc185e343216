"""Masks in normal form: constants where they can be, parted where they must be, errors where nothing is left."""

import math

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.ir.expr import GenericConst

import stof_tvm
from relax_passes.attention import fold_masks
from relax_passes.attention.composite import emit_attention
from relax_passes.attention.fold_masks import NOTES, PARTED_NOTE, FoldMasks, fold
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.attention.spelled import SPELLINGS, B, H, S
from tests.relax_passes.attention.test_canonicalize_attention import TOLERANCE
from tests.relax_passes.conftest import attention_calls
from tir_kernels.errors import MaskError

MIN = np.finfo(np.float32).min
TRIL = np.tril(np.ones((S, S), bool))


@pytest.mark.parametrize("index", range(len(SPELLINGS)), ids=[s.function.__name__ for s in SPELLINGS])
def test_a_spelling_gets_its_normal_form_and_keeps_its_numbers(folded_spellings, index):
    spelling = SPELLINGS[index]
    name = spelling.function.__name__
    call = folded_spellings.calls[name]
    if spelling.mask is None and name != "kv_expand_sdpa":
        assert call.mask is None
    elif spelling.mask is not None:
        mask = call.mask.value.numpy()
        assert mask.dtype == np.bool_
        expected = spelling.mask.numpy()
        np.testing.assert_array_equal(mask, expected.reshape((1,) * (4 - expected.ndim) + expected.shape))
    shape = None if call.bias is None else tuple(int(n) for n in call.bias.ty.shape)
    assert shape == spelling.bias
    assert folded_spellings.error(index) < TOLERANCE.get(name, 2e-6)


def test_equal_masks_share_one_constant(folded_spellings):
    masks = [folded_spellings.calls[name].mask for name in ("add_float_mask", "tril_in_graph", "padding_and_causal")]
    assert all(mask.same_as(masks[0]) for mask in masks)


def test_parting_a_finite_fill_of_the_same_run_time_mask_needs_no_note(folded_spellings):
    assert not [str(site) for site, note in folded_spellings.mod.attrs[NOTES] if str(note) == PARTED_NOTE]


# -- hand-written modules -------------------------------------------------------------------------------------------


def module(make_mask=None, make_bias=None, extra=(), batch=1, heads=2):
    """main(q, k, v, *extra) with one attention whose mask and bias two functions emit."""
    builder = relax.BlockBuilder()
    qkv = [relax.Var(name, relax.TensorType((batch, heads, S, 8), "float32")) for name in "qkv"]
    with builder.function("main", [*qkv, *extra]):
        with builder.dataflow():
            mask = None if make_mask is None else make_mask(builder.emit)
            bias = None if make_bias is None else make_bias(builder.emit)
            out = emit_attention(builder, *qkv, mask=mask, bias=bias, site="layer.0", spelling="sdpa")
            out = builder.emit_output(out)
        builder.emit_func_output(out)
    return builder.finalize()


def causal_by_arange(emit, batch=1):
    rows = emit(relax.op.expand_dims(emit(relax.op.arange(0, S, 1, "int64")), 1))
    keep = emit(relax.op.less_equal(emit(relax.op.arange(0, S, 1, "int64")), rows))
    return emit(relax.op.broadcast_to(keep, (batch, 1, S, S)))


def test_before_and_expected():
    """A mask computed from arange becomes a constant; the batch, over which it is the same, becomes 1."""
    after = FoldMasks()(module(lambda emit: causal_by_arange(emit, batch=3), batch=3))
    expected = module(lambda emit: relax.const(TRIL[None, None]), batch=3)
    (name,) = (
        g.name_hint for g in after.get_global_vars() if g.name_hint != "main"
    )  # a fresh name, the old one is gone
    tvm.ir.assert_structural_equal(after[name], expected["attention_layer_0"])
    arguments, wanted = (attention_calls(mod)["layer.0"] for mod in (after, expected))
    np.testing.assert_array_equal(arguments.mask.value.numpy(), wanted.mask.value.numpy())
    assert [arguments.q, arguments.k, arguments.v] == list(after["main"].params)
    assert len(after["main"].body.blocks[0].bindings) == len(expected["main"].body.blocks[0].bindings) == 2


def test_a_bias_that_every_layer_computes_is_folded_once(monkeypatch):
    """As T5 adds its positions' bias and its mask in every layer: one constant, however often it is spelled out."""
    folded, layers = [], 3
    monkeypatch.setattr(fold_masks, "fold", lambda *arguments: folded.append(arguments) or fold(*arguments))
    builder = relax.BlockBuilder()
    qkv = [relax.Var(name, relax.TensorType((1, 2, S, 8), "float32")) for name in "qkv"]
    with builder.function("main", qkv):
        with builder.dataflow():
            out, far = qkv[0], relax.const(np.arange(S, dtype="float32"))
            for layer in range(layers):
                bias = builder.emit(relax.op.where(causal_by_arange(builder.emit), far, relax.const(MIN, "float32")))
                bias = builder.emit(relax.op.reshape(bias, (1, 1, S, S)))
                out = emit_attention(builder, out, *qkv[1:], bias=bias, site=f"layer.{layer}", spelling="sdpa")
                out = builder.emit(out)
            out = builder.emit_output(out)
        builder.emit_func_output(out)
    calls = attention_calls(FoldMasks()(builder.finalize()))
    assert len(folded) == 1 and len(calls) == layers
    first = calls["layer.0"]
    assert all(call.bias.same_as(first.bias) and call.mask.same_as(first.mask) for call in calls.values())
    np.testing.assert_array_equal(first.mask.value.numpy()[0, 0], TRIL)


def test_a_causal_attribute_without_operands_is_left():
    before = module()
    tvm.ir.assert_structural_equal(FoldMasks()(before), before.with_attr(NOTES, []))


def test_an_open_pattern_becomes_a_bias():
    rows = relax.Var("rows", relax.TensorType((1, 1, S, S), "bool"))
    call = attention_calls(FoldMasks()(module(lambda emit: rows, extra=[rows])))["layer.0"]
    assert call.mask is None
    assert [int(n) for n in call.bias.ty.shape] == [1, 1, S, S]
    assert str(call.bias.ty.dtype) == "float32"


def test_bool_compared_with_false_is_a_negation():
    """LLVM cannot compare booleans; a mask needs no comparison."""
    keep = relax.Var("keep", relax.TensorType((1, 1, 1, S), "bool"))

    def mask(emit):
        dropped = emit(relax.op.equal(keep, relax.const(False, "bool")))
        return emit(
            relax.op.logical_not(emit(relax.op.logical_or(dropped, emit(relax.op.logical_not(causal_by_arange(emit))))))
        )

    after = FoldMasks()(module(mask, extra=[keep]))
    call = attention_calls(after)["layer.0"]
    np.testing.assert_array_equal(call.mask.value.numpy()[0, 0], TRIL)
    assert [int(n) for n in call.bias.ty.shape] == [1, 1, 1, S]
    assert "equal" not in after["main"].script()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_float_masks_of_every_dtype(dtype):
    least = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38, "float32": float(MIN)}[dtype]

    def bias(emit):
        fill = relax.const(least, dtype)
        return emit(relax.op.where(causal_by_arange(emit), relax.const(0.0, dtype), fill))

    call = attention_calls(FoldMasks()(module(None, bias)))["layer.0"]
    np.testing.assert_array_equal(call.mask.value.numpy()[0, 0], TRIL)
    assert call.bias is None


def test_a_run_time_bias_is_added_in_float32():
    learned = relax.Var("learned", relax.TensorType((2, 1, S), "float16"))

    def bias(emit):
        constant = relax.const(np.where(TRIL, 1.5, MIN).astype("float32")[None, None])
        return emit(relax.op.add(emit(relax.op.astype(emit(relax.op.expand_dims(learned, 0)), "float32")), constant))

    after = FoldMasks()(module(None, bias, extra=[learned]))
    call = attention_calls(after)["layer.0"]
    np.testing.assert_array_equal(call.mask.value.numpy()[0, 0], TRIL)
    assert str(call.bias.ty.dtype) == "float32"
    assert [str(text) for text in after.attrs[NOTES][0]] == ["layer.0", PARTED_NOTE]  # it may hold huge values


LEARNED = [relax.Var(name, relax.TensorType((1, 2, S, S), "float16")) for name in ("rows", "columns")]


def test_a_bias_that_the_model_adds_up_in_half_precision_stays_so():
    """As DeBERTa's two gathered biases: half the bytes, and what PyTorch has."""
    after = FoldMasks()(module(None, lambda emit: emit(relax.op.add(*LEARNED)), extra=LEARNED))
    total = after["main"].body.blocks[0].bindings[0].value
    assert total.op.name == "relax.add"
    assert str(attention_calls(after)["layer.0"].bias.ty.dtype) == "float16"
    assert [x.name for x in total.args] == ["rows", "columns"]


@pytest.mark.parametrize("case", ["a constant part", "a sum in float32", "a mask", "a row for all"])
def test_other_biases_are_added_up_in_float32(case):
    def bias(emit):
        rows, columns = LEARNED
        if case == "a row for all":  # which a kernel reads once, not for every row
            row = emit(relax.op.max(columns, 2, keepdims=True))
            return emit(relax.op.broadcast_to(emit(relax.op.add(row, row)), (1, 2, S, S)))
        if case == "a constant part":
            columns = relax.const(np.arange(S, dtype="float16"))
        if case == "a mask":
            columns = emit(relax.op.where(emit(relax.op.greater(columns, rows)), *halves(0.0, -math.inf)))
        if case == "a sum in float32":
            rows, columns = (emit(relax.op.astype(x, "float32")) for x in LEARNED)
        return emit(relax.op.add(rows, columns))

    halves = lambda *numbers: [relax.const(number, "float16") for number in numbers]
    call = attention_calls(FoldMasks()(module(None, bias, extra=LEARNED)))["layer.0"]
    assert str(call.bias.ty.dtype) == "float32"
    assert case != "a row for all" or int(call.bias.ty.shape[2]) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_plus_infinity_are_errors(value):
    values = np.zeros((1, 1, S, S), "float32")
    values[0, 0, 3, 4] = value
    with pytest.raises(MaskError, match=r"layer\.0.*(NaN|\+inf)"):
        FoldMasks()(module(None, lambda emit: relax.const(values)))


def test_a_mask_that_keeps_nothing_is_an_error():
    with pytest.raises(MaskError, match=r"layer\.0.*keeps nothing"):
        FoldMasks()(module(lambda emit: relax.const(np.zeros((1, 1, S, S), bool))))


# -- the normal form ------------------------------------------------------------------------------------------------


def softmax(x):
    x = x.astype(np.float64)
    largest = x.max(-1, keepdims=True)
    weights = np.exp(x - np.where(np.isneginf(largest), 0, largest))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def float_masks():
    random = np.random.default_rng(0)
    some = np.where(random.random((2, 3, 7, 9)) < 0.5, 0, -np.inf).astype("float32")
    averaging = np.where(np.tril(np.ones((7, 9), bool), -1), 0, MIN).astype("float32")[None, None]
    return {
        "infinities, some rows empty": [np.where(np.tril(np.ones((7, 9)), -1), 0, -np.inf)],
        "per batch and head": [some],
        "finfo.min, one row of nothing else": [averaging],
        "-1e9 below -1e4": [
            np.where(random.random((7, 9)) < 0.3, -1e9, np.where(random.random((7, 9)) < 0.5, -1e4, 0.5))
        ],
        "-5000 is no mask": [np.where(random.random((7, 9)) < 0.5, -5000.0, 1.0)],
        "two masks and a bias": [some, averaging, random.standard_normal((1, 3, 1, 9))],
        "all finfo.min": [np.full((1, 1, 1, 1), MIN)],
        "by column": [np.array([0, -np.inf, 0, MIN, 0, 0, -1e9, 1, 2])[None]],
    }


@pytest.mark.parametrize("name", float_masks())
def test_a_float_mask_in_normal_form_gives_the_same_weights(name):
    """In float32, as the kernels compute: huge values absorb the scores."""
    bias = [b.astype("float32") for b in float_masks()[name]]
    scores = np.random.default_rng(1).standard_normal((2, 3, 7, 9)).astype("float32")
    with np.errstate(over="ignore"):
        expected = softmax(sum(bias, start=scores))
    folded = fold([], bias, "site")
    x = scores if folded.bias is None else scores + folded.bias
    x = x if folded.mask is None else np.where(folded.mask, x, -np.inf)
    np.testing.assert_allclose(softmax(x), expected, atol=1e-6)


@pytest.mark.parametrize("fill", [-np.inf, float(MIN), -1e9, -1e4])
@pytest.mark.parametrize("diagonal", [0, -1], ids=["no row empty", "first row empty"])
def test_a_fill_is_the_float_mask_it_stands_for(fill, diagonal):
    keep = np.tril(np.ones((7, 9), bool), diagonal)
    symbolic = fold([], [], "site", [(keep, fill)])
    float_mask = fold([], [np.where(keep, 0, fill)], "site")
    np.testing.assert_array_equal(symbolic.mask, float_mask.mask)
    np.testing.assert_equal(symbolic.bias, float_mask.bias)
    masks = fill <= -1e8
    assert (
        symbolic.has_averaging_rows == float_mask.has_averaging_rows == (diagonal == -1 and np.isfinite(fill) and masks)
    )
    assert symbolic.is_hard == float_mask.is_hard == (np.isinf(fill) or not masks)
    assert symbolic.assumed == float_mask.assumed == (1e9 if fill == -1e9 else None)
    assert (symbolic.mask is not None) == masks


def test_a_bound_of_the_scores_makes_a_mask_of_less():
    keep = np.tril(np.ones((7, 9), bool))
    for fold_it in (
        lambda gap: fold([], [], "site", [(keep, -1e4)], gap),
        lambda gap: fold([], [np.where(keep, 0, -1e4)], "site", gap=gap),
    ):
        proved, unproved = fold_it(2 * 4900.0 + 104), fold_it(2 * 5000.0 + 104)
        np.testing.assert_array_equal(proved.mask[0, 0], keep)
        assert proved.bias is None and proved.assumed is None
        assert unproved.mask is None and unproved.bias.min() == -1e4


def test_averaging_rows_cost_one_column_of_bias():
    (bias,) = float_masks()["finfo.min, one row of nothing else"]
    folded = fold([], [bias], "site")
    assert folded.has_averaging_rows
    assert folded.bias.shape == (1, 1, 7, 1) and folded.mask.shape == (1, 1, 7, 9)
    assert folded.mask[0, 0, 0].all() and not folded.mask[0, 0, 1, 1:].any()


def test_what_is_the_same_everywhere_is_stored_once():
    keep = np.broadcast_to(np.tril(np.ones((7, 9), bool)), (4, 3, 7, 9))
    folded = fold([keep], [np.broadcast_to(np.arange(9, dtype="float32"), (4, 3, 7, 9))], "site")
    assert folded.mask.shape == (1, 1, 7, 9) and folded.bias.shape == (1, 1, 1, 9)


def test_what_masks_nothing_is_dropped():
    folded = fold([np.ones((1, 1, 7, 9), bool)], [np.zeros((7, 9), "float32")], "site")
    assert folded.mask is None and folded.bias is None


# -- semantics at run time -------------------------------------------------------------------------------------------


class PartlyClosed(nn.Module):
    """Row 0 keeps nothing whatever the padding is: it averages over all keys, so the mask must not be parted."""

    def forward(self, q, k, v, keep):
        allowed = torch.ones(S, S).tril(-1).bool() & (keep != 0)[:, None, None]
        return torch.softmax(q @ k.transpose(-1, -2) + torch.where(allowed, 0.0, float(MIN)), -1) @ v


def test_a_finite_mask_with_an_empty_row_is_not_parted(compile_model):
    q, k, v = torch.randn(3, B, H, S, 8, generator=torch.Generator().manual_seed(0))
    keep = torch.ones(B, S, dtype=torch.int64)
    keep[1, 8:] = 0
    compiled = compile_model(PartlyClosed(), (q, k, v, keep))
    (call,) = compiled.calls.values()
    assert call.mask is None and not isinstance(call.bias, GenericConst)
    assert compiled.error(0) < 2e-6


class Attention(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.fill = fill

    def forward(self, q, k, v, keep):
        x = (q @ k.transpose(-1, -2)).masked_fill(keep[:, None, None] == 0, self.fill)
        return torch.softmax(x, -1) @ v


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_a_batch_entry_of_nothing_but_padding_averages(compile_model, fill):
    q, k, v = torch.randn(3, B, H, S, 8, generator=torch.Generator().manual_seed(0))
    keep = torch.ones(B, S, dtype=torch.int64)
    keep[1] = 0
    compiled = compile_model(Attention(fill), (q, k, v, keep))
    assert len(compiled.calls) == 1
    assert compiled.error(0) < 2e-6


class EmptyRows(nn.Module):
    """Each attention has another row without keys, for which a softmax gives NaN."""

    def forward(self, q):
        results = []
        for i in range(6):
            dropped = torch.zeros(16, 16, dtype=torch.bool)
            dropped[i] = True
            scores = ((q + i) @ q.mT).masked_fill(dropped, -math.inf)
            results.append(scores.softmax(-1) @ q)
        return torch.stack(results)


def test_each_attention_has_its_own_empty_rows():
    """Arrays of one attention that are gone may leave their ids to those of the next."""
    q = torch.randn(1, 2, 16, 8)
    engine = stof_tvm.build(EmptyRows(), target=QUICK_LLVM, example_inputs=(q,), verify=False)
    assert torch.equal(engine(q).isnan().any(-1)[:, 0, 0], torch.eye(16, dtype=torch.bool)[:6])
