"""Heads folded into rows, against PyTorch's numbers, also with a mask that is given; what stays folded is refused."""

from unittest import mock

import pytest
import torch
import tvm
from torch import nn
from tvm.script import ir as I
from tvm.script import relax as R

import stof_tvm
from relax_passes.attention.canonicalize_attention import CanonicalizeAttention
from relax_passes.attention.layouts.unfold_heads import UnfoldHeads
from relax_passes.attention.layouts.upright_scores import UprightScores
from stof_tvm import masks
from stof_tvm.errors import NotRewrittenError
from tests.models.quick_llvm import QUICK_LLVM
from tests.models.running import largest_error
from tests.relax_passes.attention.folded_programs import PROGRAMS, H, inputs
from tests.relax_passes.attention.near_misses import S
from tests.relax_passes.attention.programs import All, One, program_of, reasons

REACHED = [program for program in PROGRAMS if program.reason is None]
REFUSED = [program for program in PROGRAMS if program.reason is not None]
MASK = masks.sliding_window(2)
OF_HEADS = masks.per_head([masks.sliding_window(n) for n in range(1, H + 1)])


@pytest.fixture(scope="module")
def compiled(compile_model):
    return compile_model(All(PROGRAMS), inputs(), passes=[UnfoldHeads(), UprightScores(), CanonicalizeAttention()])


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=[program.name for program in PROGRAMS])
def test_numbers_are_those_of_pytorch(compiled, index):
    assert largest_error(compiled.outputs[index], compiled.expected[index]) < 3e-6


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_what_is_proved_becomes_attention_and_nothing_else(compiled, program):
    found = reasons(compiled.mod, program)
    assert (program.name in map(program_of, compiled.calls)) == (program.reason is None), found
    assert len(found) == (program.reason is not None)
    assert program.reason is None or program.reason in found[0]


def test_heads_share_their_keys(compiled):
    heads = {site: (int(call.q.ty.shape[1]), int(call.k.ty.shape[1])) for site, call in compiled.calls.items()}
    for name in ("palm", "length_first", "keys_first", "by_bmm", "by_matmul_of_queries_and_heads", "values_by_matmul"):
        assert heads[name] == (H, 1), name
    for name in ("groups", "groups_length_first", "groups_of_rows_by_matmul", "groups_first"):
        assert heads[name] == (H, 2), name


@pytest.fixture(scope="module")
def masked():
    return stof_tvm.build(All(REACHED), QUICK_LLVM, inputs(), MASK, verify=False)(*inputs())


@pytest.mark.parametrize("index", range(len(REACHED)), ids=[program.name for program in REACHED])
def test_a_mask_reaches_the_scores(masked, index):
    compare_with_masked_softmax(REACHED[index].function, masked[index], MASK.dense(S))


@pytest.mark.parametrize("name", ["palm", "length_first", "groups", "groups_length_first", "groups_inside"])
def test_a_mask_of_each_head_reaches_that_head(name):
    """Heads are counted in the order of the scores' dimensions."""
    (program,) = (program for program in PROGRAMS if program.name == name)
    out = stof_tvm.build(One(program.function), QUICK_LLVM, inputs(), OF_HEADS, verify=False)(*inputs())
    compare_with_masked_softmax(program.function, out, OF_HEADS.dense(S)[0])


def compare_with_masked_softmax(function, out, kept):
    softmax = torch.softmax

    def of_kept(x, dim):
        return softmax(x.masked_fill(~(kept if kept.dim() < 3 else kept.reshape(x.shape[1:])), -torch.inf), dim)

    with mock.patch.object(torch, "softmax", of_kept):
        expected = function(*inputs())
    is_row = expected.isfinite()
    assert is_row.float().mean() > 0.4
    torch.testing.assert_close(out[is_row], expected[is_row], atol=1e-5, rtol=0)
    assert ((out == 0) | out.isnan())[~is_row].all()


@pytest.mark.parametrize("program", REFUSED, ids=[program.name for program in REFUSED])
def test_a_mask_that_would_not_reach_the_scores_is_refused(program):
    with pytest.raises(NotRewrittenError, match=program.reason):
        stof_tvm.build(One(program.function), QUICK_LLVM, inputs(), MASK, verify=False)


class Folded(nn.Module):
    """Multi-query attention of rows that stay folded through the softmax."""

    def __init__(self, is_length_first):
        super().__init__()
        self.q, self.kv, self.is_length_first = nn.Linear(24, 24), nn.Linear(24, 12), is_length_first

    def forward(self, x, keep):
        batch, length, _ = x.shape
        q, (k, v) = self.q(x).view(batch, length, 4, 6), self.kv(x).chunk(2, -1)
        q = q if self.is_length_first else q.transpose(1, 2)
        x = torch.bmm(q.reshape(batch, 4 * length, 6), k.mT) * 2
        out = torch.bmm(torch.softmax(x.masked_fill(~keep[:, None], -torch.inf), -1), v).view_as(q)
        return out if self.is_length_first else out.transpose(1, 2)


@pytest.mark.parametrize("is_length_first", [False, True])
def test_a_mask_meets_queries_whose_heads_are_folded_into_rows(is_length_first):
    torch.manual_seed(0)
    model, x, keep = Folded(is_length_first).eval(), torch.randn(2, S, 24), torch.ones(2, S, dtype=torch.bool)
    keep[1, 6:] = False
    softmax = torch.softmax

    def of_kept(scores, dim):
        kept = MASK.dense(S)
        kept = kept.repeat_interleave(4, 0) if is_length_first else kept.repeat(4, 1)
        return softmax(scores.masked_fill(~kept, -torch.inf), dim)

    with torch.no_grad(), mock.patch.object(torch, "softmax", of_kept):
        expected = model(x, keep)
    engine = stof_tvm.build(model, QUICK_LLVM, (x, keep), MASK, verify=False)
    torch.testing.assert_close(engine(x, keep), expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        plain = stof_tvm.build(model, QUICK_LLVM, (x, keep), verify=False)
        torch.testing.assert_close(plain(x, keep), model(x, keep), atol=1e-5, rtol=0)


class Grouped(nn.Module):
    """Groups of heads by einsum, of x (batch, queries, 24), over x or over keys of a cache."""

    def __init__(self, equations, kv_heads, group):
        super().__init__()
        self.equations, self.kv_heads, self.group = equations, kv_heads, group
        self.q = nn.Linear(24, kv_heads * group * 6)
        self.kv = nn.Linear(24, 2 * kv_heads * 6)

    def forward(self, x, memory):
        q = self.q(x).view(*x.shape[:2], self.kv_heads, self.group, 6)
        k, v = self.kv(memory).view(*memory.shape[:2], 2, self.kv_heads, 6).unbind(2)
        if self.equations[0].startswith("bk"):
            q, k, v = q.permute(0, 2, 3, 1, 4), k.transpose(1, 2), v.transpose(1, 2)
        weights = torch.softmax(torch.einsum(self.equations[0], q, k) * 0.4, -1)
        return torch.einsum(self.equations[1], weights, v)


GROUPED = [("bkgid,bkjd->bkgij", "bkgij,bkjd->bkgid"), ("bikgd,bjkd->bkgij", "bkgij,bjkd->bikgd")]


@pytest.mark.parametrize("equations", GROUPED, ids=["heads first", "tokens first"])
@pytest.mark.parametrize("kv_heads, group", [(2, 4), (1, 4), (2, 1)])
@pytest.mark.parametrize("batch, keys", [(1, 1), (2, S)])
def test_one_query_of_grouped_heads(equations, kv_heads, group, batch, keys):
    """A dimension of size 1 is no dimension of a product that einsum makes: its rows are heads alone."""
    torch.manual_seed(0)
    model, x = Grouped(equations, kv_heads, group).eval(), torch.randn(batch, 1, 24)
    memory, kept = torch.randn(batch, keys, 24), torch.arange(keys) % 3 != 1
    softmax = torch.softmax
    masked = lambda scores, dim: softmax(scores.masked_fill(~kept, -torch.inf), dim)
    with torch.no_grad(), mock.patch.object(torch, "softmax", masked):
        expected = model(x, memory)
    engine = stof_tvm.build(model, QUICK_LLVM, (x, memory), kept[None], verify=False)
    (site,) = engine.report().rewritten
    assert (site.shape.q_len, site.shape.kv_len) == (1, keys)
    assert (site.shape.heads, site.shape.kv_heads) == (kv_heads * group, kv_heads)
    torch.testing.assert_close(engine(x, memory), expected, atol=1e-5, rtol=0)


class TokensBesideOne(nn.Module):
    """One head, whose scores have a dimension of size 1 where grouped heads of one query have theirs."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(24, 18)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax((q @ k.mT)[:, :, None], -1)  # (batch, queries, 1, keys)
        return weights.squeeze(2) @ v


class MixedTokensBesideOne(TokensBesideOne):
    """The same of queries that a weight mixes: it made their number, which counts tokens all the same."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(S, S)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax((self.mix(q.mT).mT @ k.mT)[:, :, None], -1)
        return weights.squeeze(2) @ v


@pytest.mark.parametrize("kind", [TokensBesideOne, MixedTokensBesideOne])
@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_are_not_taken_for_heads_of_one_query(kind, batch):
    """Their mask is one of (S, S) elements, and not of one row for each of S heads."""
    model, x = kind().eval(), torch.randn(batch, S, 24)
    with pytest.raises(NotRewrittenError, match="relax.squeeze stands between"):
        stof_tvm.build(model, QUICK_LLVM, (x,), MASK, verify=False)


@I.ir_module
class Before:
    @R.function
    def main(
        q: R.Tensor((2, 15, 8), "float32"), k: R.Tensor((2, 8, 7), "float32"), v: R.Tensor((2, 7, 4), "float32")
    ) -> R.Tensor((2, 15, 4), "float32"):
        with R.dataflow():
            scores = R.matmul(q, k)
            split = R.reshape(scores, (2, 3, 5, 7))
            weights = R.nn.softmax(split, axis=-1)
            joined = R.reshape(weights, (2, 15, 7))
            out = R.matmul(joined, v)
            R.output(out)
        return out


@I.ir_module
class Expected:
    @R.function
    def main(
        q: R.Tensor((2, 15, 8), "float32"), k: R.Tensor((2, 8, 7), "float32"), v: R.Tensor((2, 7, 4), "float32")
    ) -> R.Tensor((2, 15, 4), "float32"):
        with R.dataflow():
            heads = R.reshape(q, (2, 3, 5, 8))
            upright = R.permute_dims(k, [0, 2, 1])
            shared = R.reshape(upright, (2, 1, 7, 8))
            turned = R.permute_dims(shared, [0, 1, 3, 2])
            scores = R.matmul(heads, turned)
            weights = R.nn.softmax(scores, axis=-1)
            values = R.reshape(v, (2, 1, 7, 4))
            products = R.matmul(weights, values)
            out = R.reshape(products, (2, 15, 4))
            R.output(out)
        return out


def test_expected():
    tvm.ir.assert_structural_equal(UnfoldHeads()(Before), Expected)
    tvm.ir.assert_structural_equal(UnfoldHeads()(Expected), Expected)
