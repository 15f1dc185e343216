"""Choices and numbers that constants decide: what is folded before attention is matched, and what is not."""

import numpy as np
import pytest
import torch
from tvm import relax

import stof_tvm
from relax_passes.attention import fold_conditions
from relax_passes.attention.fold_conditions import FoldConditions
from relax_passes.attention.fold_scalars import FoldScalars
from relax_passes.ir.bindings import operator
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.fusion.modules import module_of

op = relax.op
X = relax.Var("x", relax.TensorType((2, 4, 8), "float32"))
FILL = relax.const(float("-inf"), "float32")


def names(rewrite, body, params=(X,)) -> list[str]:
    """The operators of a function after a pass."""
    found = rewrite(module_of(list(params), lambda builder: body(builder.emit)))["main"]
    calls = [binding.value for block in found.body.blocks for binding in block.bindings]
    return [operator(call) for call in calls if operator(call)]


def where(condition, shape=(2, 4, 8)):
    """where(condition, -inf, x) for a constant condition."""
    array = np.broadcast_to(np.asarray(condition), shape)
    return lambda emit: emit(op.where(relax.const(array), FILL, emit(op.exp(X))))


def test_a_mask_of_nothing_is_no_choice():
    assert names(FoldConditions(), where(False)) == ["exp"]


def test_a_choice_of_the_smaller_value_is_broadcast():
    assert names(FoldConditions(), where(True)) == ["broadcast_to"]


@pytest.mark.parametrize("shape", [(2, 4, 8), (4, 8), (1, 1, 8)])
def test_a_mask_of_something_stays(shape):
    mask = np.zeros(shape, bool)
    mask[..., -1] = True
    assert names(FoldConditions(), where(mask, shape)) == ["exp", "where"]


def test_a_mask_that_is_given_at_run_time_stays():
    mask = relax.Var("mask", relax.TensorType((2, 4, 8), "bool"))
    assert "where" in names(FoldConditions(), lambda emit: emit(op.where(mask, FILL, X)), (X, mask))


def places(low: int, high: int):
    """Whether constant places, broadcast over heads, lie inside 0 … 7: as a gather asks."""

    def body(emit):
        index = emit(op.broadcast_to(relax.const(np.arange(low, high).reshape(1, 1, -1)), (2, 4, high - low)))
        inside = emit(op.greater_equal(index, relax.const(0, "int64")))
        inside = emit(op.logical_and(inside, emit(op.less(index, relax.const(8, "int64")))))
        outside = emit(op.logical_not(inside))
        return emit(op.where(outside, relax.const(float("nan"), "float32"), emit(op.exp(X))))

    return body


def test_comparisons_are_decided_before_they_are_broadcast(monkeypatch):
    monkeypatch.setattr(fold_conditions, "LARGEST", 8)
    assert names(FoldConditions(), places(0, 8)) == ["exp"]
    assert "where" in names(FoldConditions(), places(-1, 7))
    assert "where" in names(FoldConditions(), places(1, 9))


def test_what_is_large_is_not_computed(monkeypatch):
    monkeypatch.setattr(fold_conditions, "LARGEST", 7)
    assert "where" in names(FoldConditions(), places(0, 8))


def test_the_root_that_scales_scores_is_a_number():
    def body(emit):
        root = emit(op.sqrt(emit(op.multiply(relax.const(64.0, "float32"), relax.const(3.0, "float32")))))
        return emit(op.divide(X, root))

    assert names(FoldScalars(), body) == ["divide"]
    assert names(FoldScalars(), lambda emit: emit(op.exp(X))) == ["exp"]


def test_disentangled_attention_runs_in_a_kernel_in_half_precision():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.DebertaV2Config(
        **sizes, vocab_size=50, relative_attention=True, position_buckets=16, pos_att_type=["p2c", "c2p"]
    )
    model = transformers.DebertaV2Model(config).eval().half()
    ids = torch.randint(0, 50, (1, 32))
    engine = stof_tvm.build(model, QUICK_LLVM, (ids,), verify=False)
    assert len(engine.report().rewritten) == 1
    expected = model.float()(ids).last_hidden_state
    torch.testing.assert_close(engine(ids)[0].float(), expected.detach(), atol=1e-2, rtol=1e-2)
