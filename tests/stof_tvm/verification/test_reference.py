"""PyTorch's results with masks applied to every spelling of attention, against a formula written apart from it."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import UnsupportedError
from stof_tvm.frontend import import_model
from stof_tvm.report import Report
from stof_tvm.verification import masked_nodes
from stof_tvm.verification.reference import Reference, reference_outputs
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.rows import ROW
from tir_kernels.report_rows import AttentionShape

BATCH, HEADS, LENGTH, DIM, SINK = 2, 3, 16, 8, 0.25
QKV = tuple(torch.randn(3, BATCH, HEADS, LENGTH, DIM, generator=torch.Generator().manual_seed(0)))
SITE = replace(ROW, site="", shape=AttentionShape(BATCH, HEADS, HEADS, LENGTH, LENGTH, DIM, "float32"))
RANDOM = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.6
RANDOM[5] = False  # a row that nothing is left of
MASKS = {
    "random": masks.from_tensor(RANDOM),
    "per head": masks.per_head([masks.causal(), masks.sliding_window(2), ~masks.sliding_window(15)]),
}


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(DIM)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def softmax(q, k, v):
    return scores(q, k).softmax(-1) @ v


def softmax_of_heads_in_one_dimension(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return (scores(q, k).softmax(-1) @ v).unflatten(0, (BATCH, HEADS))


def exp_of_shifted(q, k, v):
    s = scores(q, k)
    weights = (s - s.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def normalised_after_the_product(q, k, v):
    s = scores(q, k)
    weights = (s - s.max(-1, keepdim=True).values).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def one_exp(q, k, v):
    weights = scores(q, k).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def log_softmax(q, k, v):
    return F.log_softmax(scores(q, k), -1).exp() @ v


def logsumexp(q, k, v):
    s = scores(q, k)
    return torch.exp(s - torch.logsumexp(s, -1, keepdim=True)) @ v


def sink_last(q, k, v):
    s = torch.cat([scores(q, k), torch.full((BATCH, HEADS, LENGTH, 1), SINK)], -1)
    return (s - s.max(-1, keepdim=True).values).softmax(-1)[..., :-1] @ v


def sink_first(q, k, v):
    s = torch.cat([torch.full((BATCH, HEADS, LENGTH, 1), SINK), scores(q, k)], -1)
    return s.softmax(-1)[..., 1:] @ v


def sink_padded(q, k, v):
    return F.pad(scores(q, k), (1, 0), value=SINK).softmax(-1)[..., 1:] @ v


def sink_in_the_sum(q, k, v):
    s = scores(q, k)
    top = torch.maximum(s.amax(-1, keepdim=True), torch.full((1,), SINK, dtype=q.dtype))
    weights = (s - top).exp()
    return weights / (weights.sum(-1, keepdim=True) + (SINK - top).exp()) @ v


def sink_added_to_logsumexp(q, k, v):
    s = scores(q, k)
    return (s - torch.logaddexp(s.logsumexp(-1, keepdim=True), torch.full((1,), SINK, dtype=q.dtype))).exp() @ v


def sink_as_a_gate(q, k, v):
    s = scores(q, k)
    return s.softmax(-1) @ v * torch.sigmoid(s.logsumexp(-1, keepdim=True) - SINK)


def sink_as_a_gate_of_a_maximum(q, k, v):
    s = scores(q, k)
    top = s.amax(-1, keepdim=True)
    return s.softmax(-1) @ v * torch.sigmoid((s - top).exp().sum(-1, keepdim=True).log() + top - SINK)


def softmax_over_keys_by_queries(q, k, v):
    return scores(k, q).softmax(-2).mT @ v


def sink_padded_over_keys_by_queries(q, k, v):
    return v.mT @ F.pad(scores(k, q), (0, 0, 1, 0), value=SINK).softmax(-2)[..., 1:, :]


def sink_as_a_gate_over_keys_by_queries(q, k, v):
    s = scores(k, q)
    return (s.softmax(-2) * torch.sigmoid(s.logsumexp(-2, keepdim=True) - SINK)).mT @ v


def sink_by_log1p(q, k, v):
    s = scores(q, k) - SINK
    return (s - s.exp().sum(-1, keepdim=True).log1p()).exp() @ v


# Spelling -> the operator that names the site.
SPELLINGS = {
    sdpa: "scaled_dot_product",
    softmax: "softmax",
    softmax_of_heads_in_one_dimension: "softmax",
    exp_of_shifted: "exp.",
    normalised_after_the_product: "exp.",
    one_exp: "exp.",
    log_softmax: "log_softmax",
    logsumexp: "exp.",
    sink_last: "softmax",
    sink_first: "softmax",
    sink_padded: "softmax",
    softmax_over_keys_by_queries: "softmax",
    sink_padded_over_keys_by_queries: "softmax",
    sink_as_a_gate_over_keys_by_queries: "softmax",
    sink_by_log1p: "exp.",
    sink_in_the_sum: "exp.",
    sink_added_to_logsumexp: "exp.",
    sink_as_a_gate: "softmax",
    sink_as_a_gate_of_a_maximum: "softmax",
}


def module(function):
    class Spelled(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    return Spelled().eval()


def reference_of(function, operator: str, mask, args=QKV) -> Reference:
    imported = import_model(module(function), args)
    node = next(n for n in imported.source.graph_module.graph.nodes if operator in str(n.target))
    return Reference(replace(imported, site_nodes={"": node.name}), [SITE], lambda *site: mask)


def expected(mask, sink=None):
    q, k, v = (x.double() for x in QKV)
    weights = scores(q, k).exp() * mask.dense(LENGTH)
    total = weights.sum(-1, keepdim=True) + (0.0 if sink is None else math.exp(sink))
    return torch.where(total > 0, weights @ v / total, 0.0)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gets_the_mask(spelling, mask):
    reference = reference_of(spelling, SPELLINGS[spelling], mask)
    assert not reference.untied
    wanted = expected(mask, SINK if "sink" in spelling.__name__ else None)
    wanted = wanted.mT if spelling is sink_padded_over_keys_by_queries else wanted
    torch.testing.assert_close(reference(QKV, {})[0].double(), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(reference.precise(QKV, {}, torch.float64)[0], wanted, atol=1e-12, rtol=0)


def test_long_attention_is_computed_in_parts(monkeypatch):
    whole = reference_of(sdpa, "scaled_dot_product", MASKS["random"])(QKV, {})[0]
    monkeypatch.setattr(masked_nodes, "CHUNK_SCORES", 5 * BATCH * HEADS * LENGTH)
    parts = reference_of(sdpa, "scaled_dot_product", masks.sliding_window(1) & MASKS["random"])
    node = next(x for x in parts.graph.children() if isinstance(x, masked_nodes.MaskedSdpa))
    assert node.chunk == 5
    torch.testing.assert_close(parts(QKV, {})[0].double(), expected(masks.sliding_window(1) & MASKS["random"]))
    assert any(columns is not None for columns in node.columns.values())
    assert whole.shape == parts(QKV, {})[0].shape


def test_a_row_that_the_model_empties_stays_what_pytorch_makes_of_it():
    own = torch.ones(LENGTH, LENGTH).tril().masked_fill(torch.arange(LENGTH)[:, None] == 3, 0.0).log()
    out = reference_of(lambda q, k, v: (scores(q, k) + own).softmax(-1) @ v, "softmax", MASKS["random"])(QKV, {})[0]
    assert out[:, :, 3].isnan().all() and (out[:, :, 5] == 0).all()
    rest = [i for i in range(LENGTH) if i not in (3, 5)]
    assert out[:, :, rest].isfinite().all()


@pytest.mark.parametrize(
    ("function", "operator", "why"),
    [
        (lambda q, k, v: scores(q, k).softmax(1) @ v, "softmax", "over dimension"),
        (lambda q, k, v: (e := scores(k, q).exp()).mT @ v / e.sum(-2, True).mT, "exp.", "not over the last dimension"),
        (lambda q, k, v: scores(q, k)[..., 2:].softmax(-1) @ v[..., 2:, :], "softmax", "14 columns for 16 keys"),
        (lambda q, k, v: scores(q, k)[..., 2:, :].softmax(-1) @ v, "softmax", "14 rows for 16 queries"),
        (lambda q, k, v: scores(q, k).sigmoid() @ v, "sigmoid", "no attention that the reference knows"),
        (lambda q, k, v: scores(q, k).exp() @ v / (2 * scores(q, k)).exp().sum(-1, True), "exp.", "their own sum"),
        (lambda q, k, v: scores(q, k).exp() @ v, "bmm", "no node"),
    ],
)
def test_what_cannot_be_tied_is_said(function, operator, why):
    imported = import_model(module(function), QKV)
    nodes = [n.name for n in imported.source.graph_module.graph.nodes if operator in str(n.target)]
    site_nodes = {"": nodes[0]} if nodes else {}
    reference = Reference(replace(imported, site_nodes=site_nodes), [SITE], lambda *site: masks.causal())
    assert why in reference.untied[""]


def test_a_wider_computation_ignores_the_dtypes_that_the_model_names():
    def function(x):
        return (x.half() * 3).to(torch.bfloat16).float() + torch.ones(4, dtype=torch.float16)

    imported = import_model(module(function), (x := torch.tensor([0.1, 0.2, 1e-9, 7.0]),))
    (out,) = Reference(imported).precise((x,), {}, torch.float64)
    torch.testing.assert_close(out, x.double() * 3 + 1, atol=1e-12, rtol=0)


def test_the_outputs_of_a_model_as_an_engine_computes_it():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32, batch_first=True).eval()
    x, mask = torch.randn(1, 24, 16), {"self_attn": masks.sliding_window(2)}
    engine = stof_tvm.build(layer, QUICK_LLVM, (x,), mask, verify=False)
    (out,) = reference_outputs(layer, (x,), report=engine.report(), mask=mask, dtype=torch.float64)
    plain = layer(x, src_mask=~masks.sliding_window(2).dense(24))
    torch.testing.assert_close(out.float(), plain, atol=1e-5, rtol=0)
    assert out.dtype == torch.float64 and not torch.allclose(out.float(), layer(x), atol=1e-3)


def test_a_mask_that_cannot_be_applied_is_an_error():
    report = Report("llvm", (replace(SITE, site="elsewhere"),), (), "0x0")
    with pytest.raises(UnsupportedError, match="elsewhere: no node"):
        reference_outputs(module(softmax), QKV, report=report, mask=masks.causal())


class MeanOfInts(torch.nn.Module):
    def forward(self, x):
        mean = x.float().mean(-1)
        return mean, mean >= 2.0, x.float()


def test_sums_are_changed_where_inputs_are():
    """What a rounding of a sum decides (`x >= x.mean()` of equal numbers) is no error of an engine."""
    x = torch.full((3, 4), 2)
    reference = Reference(import_model(MeanOfInts(), (x,)))
    mean, is_large, copy = reference((x,), {}, lambda tensor: tensor - 1, sums=True)
    assert mean.tolist() == [1.0] * 3 and is_large.tolist() == [False] * 3 and torch.equal(copy, x.float())
    assert reference((x,), {})[1].all()
