"""Attentions over caches get their rows of a given mask: modules before and after, and what stays as it is."""

import json
import math
import re

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.attention.caches.rows_of_caches import RowsOfCaches
from relax_passes.attention.composite import causal_keep, emit_attention
from relax_passes.attention.fold_masks import FoldMasks
from relax_passes.ir.bindings import STATES, Bindings
from tests.relax_passes.conftest import attention_calls
from tir_kernels.errors import MaskError
from tir_kernels.scatter import scatter

op = relax.op
HEADS, LENGTH, SIZE, TOKENS = 2, 16, 8, 3
GIVEN = RowsOfCaches(lambda path, sizes: "a mask" if sizes == (1, HEADS, LENGTH, LENGTH) else None)


def module(positions, axes=(0, 1, 2, 3), wraps=True, state=True, masked=False, causal="", after=None):
    """main(q, at, keys, new) with one attention over `keys`, a cache that is written before.

    `positions(emit, at)` are int64 (3,).  `axes` are the order of (B, H, S, D) in the cache.  `after` says how the
    attention is written afterwards: called with (builder, q, keys, mask, index).
    """
    builder = relax.BlockBuilder()
    shape = [(1, HEADS, LENGTH, SIZE)[axis] for axis in axes]
    length = axes.index(2)
    around = math.prod(shape[:length]), math.prod(shape[length + 1 :])
    kernel = scatter(
        (around[0], LENGTH, around[1]), TOKENS, (1, TOKENS, 1), (around[0], TOKENS, around[1]),
        "float32", "int64", "set", math.nan, wraps,
    )  # fmt: skip
    name = builder.add_func(kernel, "scatter")
    q = relax.Var("q", relax.TensorType((1, HEADS, TOKENS, SIZE), "float32"))
    at = relax.Var("at", relax.TensorType((TOKENS,), "int64"))
    cache = relax.Var("keys", relax.TensorType(shape, "float32"))
    new = relax.Var("new", relax.TensorType((around[0], TOKENS, around[1]), "float32"))
    attributes = {STATES: json.dumps([1, [[2, 1]] if state else []])}
    with builder.function("main", [q, at, cache, new], attributes):
        emit = builder.emit
        with builder.dataflow():
            index = positions(emit, at)
            flat = emit(op.reshape(cache, (around[0], LENGTH, around[1])))
            where = emit(op.reshape(index, (1, TOKENS, 1)))
            type_ = relax.TensorType((around[0], LENGTH, around[1]), "float32")
            written = emit(op.reshape(emit(relax.call_tir(name, [flat, where, new], type_)), shape))
            keys = written if axes == (0, 1, 2, 3) else emit(op.permute_dims(written, np.argsort(axes).tolist()))
            mask = relax.const(np.ones((1, 1, TOKENS, LENGTH), bool)) if masked else None
            if after is None:
                out = emit_attention(builder, q, keys, keys, mask=mask, causal=causal, site="layer", spelling="sdpa")
            else:
                out = after(builder, q, keys, mask, index)
            result = builder.emit_output(relax.Tuple([out, written]))
        builder.emit_func_output(result)
    return builder.finalize()


def of_call(emit, at):
    return emit(op.add(at, relax.const(1, "int64")))


def given(values):
    return lambda emit, at: relax.const(np.array(values), "int64")


def call_of(mod):
    return attention_calls(mod)["layer"]


def check(mod, expected):
    """The modules are equal, but for the name of the attention's function, because the old one had it."""
    (new,) = (x for x in mod.get_global_vars() if x.name_hint.startswith("attention"))
    (old,) = (x for x in expected.get_global_vars() if x.name_hint.startswith("attention"))
    tvm.ir.assert_structural_equal(mod[new], expected[old])
    mains = []
    for of_mod, name in ((mod, new), (expected, old)):
        main, names = of_mod["main"].script().replace(f"{name.name_hint}(", "attention("), {}
        mains.append(
            re.sub(r"\b[lg]v\w*\b", lambda found, names=names: names.setdefault(found[0], f"v{len(names)}"), main)
        )
    assert mains[0] == mains[1]


def test_positions_become_an_operand():
    def after(builder, q, keys, mask, index):
        return emit_attention(builder, q, keys, keys, positions=index, site="layer", spelling="sdpa")

    check(GIVEN(module(of_call)), module(of_call, after=after))


def test_masks_of_the_call_become_a_bias():
    def after(builder, q, keys, mask, index):
        zero, minus_inf = relax.const(0.0, "float32"), relax.const(-math.inf, "float32")
        emit, shape = builder.emit, (1, 1, TOKENS, LENGTH)
        keep = emit(op.reshape(causal_keep(emit, TOKENS, LENGTH, "top-left"), shape))
        biases = [emit(op.where(x, zero, minus_inf)) for x in (keep, mask)]
        bias = emit(op.add(*biases))
        return emit_attention(builder, q, keys, keys, bias=bias, positions=index, site="layer", spelling="sdpa")

    own = dict(masked=True, causal="top-left")
    check(GIVEN(module(of_call, **own)), module(of_call, **own, after=after))


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 1, 2, 3)], ids=str)
def test_caches_in_any_layout(axes):
    after = GIVEN(module(of_call, axes))
    assert call_of(after).positions is not None and call_of(after).first_row is None


@pytest.mark.parametrize(
    "positions, first_row",
    [([4, 5, 6], 4), ([0, 1, 2], 0), ([13, 14, 15], 13), ([-3, -2, -1], 13), ([-1, 0, 1], None), ([4, 6, 8], None)],
)
def test_constant_positions_that_follow_one_another_are_a_first_row(positions, first_row):
    own = dict(masked=True, causal="top-left")
    call = call_of(GIVEN(module(given(positions), **own)))
    assert call.first_row == first_row
    assert (call.mask is not None, call.causal, call.positions is None) == (
        (True, "top-left", True) if first_row is not None else (False, "", False)
    )


def test_positions_that_are_computed_from_constants():
    arange = lambda emit, at: emit(op.add(emit(op.arange(0, TOKENS, 1, "int64")), relax.const(2, "int64")))
    assert call_of(GIVEN(module(arange))).first_row == 2


def test_beyond_the_end_constant_positions_stay_positions():
    """Their rows are NaN, as where they are known at run time."""
    assert call_of(GIVEN(module(given([14, 15, 16])))).positions is not None


def test_a_write_without_negative_positions():
    """The scatter puts a NaN there, at the nearest position: these rows are outside of the mask, too."""
    mod = GIVEN(module(of_call, wraps=False))
    bindings, call = Bindings(mod["main"]), call_of(mod)
    is_outside, outside, _ = bindings.call(call.positions, "where").args
    assert bindings.call(is_outside, "less") is not None and bindings.scalar(outside) == LENGTH


def test_masks_are_folded_beside_positions():
    """The bias of the call is left as it is, at run time and constant alike."""
    mod = FoldMasks(lambda *site: "a mask")(GIVEN(module(of_call, masked=True, causal="top-left")))
    call = call_of(mod)
    assert call.positions is not None and call.mask is None and call.causal == ""
    assert [int(n) for n in call.bias.ty.shape] == [1, 1, TOKENS, LENGTH]


@pytest.mark.parametrize("mod", [module(of_call, state=False), module(of_call)], ids=["no state", "no mask"])
def test_others_stay_as_they_are(mod):
    is_given = not json.loads(str(mod["main"].attrs[STATES]))[1]
    rows = RowsOfCaches(lambda path, sizes: "a mask" if is_given else None)
    tvm.ir.assert_structural_equal(rows(mod), mod)


def test_what_is_no_cache_is_refused():
    """More in tests/stof_tvm/test_masks_of_caches.py."""

    def after(builder, q, keys, mask, index):
        half = builder.emit(op.multiply(keys, relax.const(0.5, "float32")))
        return emit_attention(builder, q, half, keys, site="layer", spelling="sdpa")

    with pytest.raises(MaskError, match="attention 'layer' reads a cache .* but multiply stands between"):
        GIVEN(module(of_call, after=after))
