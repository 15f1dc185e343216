"""scaled_dot_product_attention becomes the composite with its mask, bias, scale and heads; PyTorch's numbers."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stof_tvm.frontend import import_model
from tests.models.running import (
    attention_sites,
    compile_imported,
    error_against_torch,
    largest_error,
    operator_names,
    softmax_sites,
)
from tests.models.spellings import ByHand, Sdpa
from tir_kernels.errors import UnsupportedError

sdpa = F.scaled_dot_product_attention

# Of t: q (2, 4, 6, 8), k (2, 4, 10, 8), v (2, 4, 10, 12), keep bool and bias float (6, 10), both keeping column 0.
# After the function: what the composite must say beside the defaults.
SPELLINGS = {
    "plain": (lambda t: sdpa(t.q, t.k, t.v), {}),
    "bool mask": (lambda t: sdpa(t.q, t.k, t.v, t.keep), {"operands": ["mask"]}),
    "bool mask by batch": (lambda t: sdpa(t.q, t.k, t.v, t.keep.expand(2, 1, 6, 10)), {"operands": ["mask"]}),
    "bool mask by head": (lambda t: sdpa(t.q, t.k, t.v, t.keep.expand(4, 6, 10)), {"operands": ["mask"]}),
    "key padding": (lambda t: sdpa(t.q, t.k, t.v, t.keep[:2, None, None, :]), {"operands": ["mask"]}),
    "fully masked row": (lambda t: sdpa(t.q, t.k, t.v, t.keep & t.not_first_row), {"operands": ["mask"]}),
    "float mask": (lambda t: sdpa(t.q, t.k, t.v, t.bias), {"operands": ["bias"]}),
    "float mask, 4-D": (lambda t: sdpa(t.q, t.k, t.v, t.bias.expand(2, 4, 6, 10)), {"operands": ["bias"]}),
    "float mask of -inf": (lambda t: sdpa(t.q, t.k, t.v, t.bias.where(t.keep, -torch.inf)), {"operands": ["bias"]}),
    "scale": (lambda t: sdpa(t.q, t.k, t.v, scale=0.7), {"scale": 0.7}),
    "scale and mask": (lambda t: sdpa(t.q, t.k, t.v, t.keep, scale=2.0), {"scale": 2.0, "operands": ["mask"]}),
    "causal": (lambda t: sdpa(t.q, t.q, t.v[:, :, :6], is_causal=True), {"causal": "top-left"}),
    "causal, more keys": (lambda t: sdpa(t.q, t.k, t.v, is_causal=True), {"causal": "top-left"}),
    "causal, more queries": (lambda t: sdpa(t.k, t.q, t.v[:, :, :6], is_causal=True), {"causal": "top-left"}),
    "grouped queries": (lambda t: sdpa(t.q, t.k[:, :2], t.v[:, :2], enable_gqa=True), {}),
    "grouped, mask by head": (
        lambda t: sdpa(t.q, t.k[:, :2], t.v[:, :2], t.keep.expand(1, 4, 6, 10), enable_gqa=True),
        {"operands": ["mask"]},
    ),
    "key and value of one head": (lambda t: sdpa(t.q, t.k[:, :1], t.v[:, :1]), {}),
    "query of one head": (lambda t: sdpa(t.q[:, :1], t.k, t.v), {}),
    "value of one head": (lambda t: sdpa(t.q, t.k, t.v[:, :1]), {}),
    "one key for the batch": (lambda t: sdpa(t.q, t.k[:1], t.v[:1]), {}),
    "one query for the batch": (lambda t: sdpa(t.q[:1], t.k, t.v, t.keep), {"operands": ["mask"]}),
    "three dimensions": (lambda t: sdpa(t.q[:, 0], t.k[:, 0], t.v[:, 0]), {}),
    "three, mask by batch": (lambda t: sdpa(t.q[0], t.k[0], t.v[0], t.keep.expand(4, 6, 10)), {"operands": ["mask"]}),
    "two dimensions": (lambda t: sdpa(t.q[0, 0], t.k[0, 0], t.v[0, 0], t.keep), {"operands": ["mask"]}),
    "five dimensions": (lambda t: sdpa(t.q[:, None], t.k[:, None], t.v[:, None], t.keep), {"operands": ["mask"]}),
    "five, broadcast": (
        lambda t: sdpa(t.q.expand(3, 2, 4, 6, 8), t.k[None], t.v[None], t.keep.expand(2, 1, 6, 10)),
        {"operands": ["mask"]},
    ),
    "one query": (lambda t: sdpa(t.q[:, :, :1], t.k, t.v, t.keep[:1]), {"operands": ["mask"]}),
}


class Table(nn.Module):
    def forward(self, q, k, v, keep, bias):
        first = torch.arange(6)[:, None] > 0
        t = SimpleNamespace(q=q, k=k, v=v, keep=keep, bias=bias, not_first_row=first)
        return {name: function(t) for name, (function, _) in SPELLINGS.items()}


def qkv(batch=2, heads=4, q_len=8, kv_len=8, dim=8):
    torch.manual_seed(0)
    return (
        torch.randn(batch, heads, q_len, dim),
        torch.randn(batch, heads, kv_len, dim),
        torch.randn(batch, heads, kv_len, dim),
    )


def kept(q_len=8, kv_len=8):
    torch.manual_seed(1)
    keep = torch.rand(q_len, kv_len) > 0.5
    keep[:, 0] = True
    return keep


@pytest.fixture(scope="module")
def table():
    q, k, _ = qkv(q_len=6, kv_len=10)
    args = (q, k, torch.randn(2, 4, 10, 12), kept(6, 10), torch.randn(6, 10))
    imported = import_model(Table(), args)
    expected = Table()(*args)
    return attention_sites(imported.mod), compile_imported(imported)(*args), expected


@pytest.mark.parametrize("name", SPELLINGS)
def test_sdpa(name, table):
    sites, got, expected = table
    position = list(SPELLINGS).index(name)
    composite = sites[f"#{position}" if position else ""]
    says = {"operands": [], "scale": 8**-0.5, "causal": "", **SPELLINGS[name][1]}
    assert [str(operand) for operand in composite.attrs["stof.operands"]] == says["operands"]
    assert composite.attrs["stof.scale"].value == pytest.approx(says["scale"])
    assert composite.attrs["stof.causal"] == says["causal"]
    assert composite.attrs["stof.spelling"] == "sdpa"
    assert largest_error(got[name], expected[name]) < 2e-6


def test_grouped_key_and_value_keep_their_heads(table):
    sites, _, _ = table
    for name in ("grouped queries", "key and value of one head"):
        key = sites[f"#{list(SPELLINGS).index(name)}"].params[1]
        assert int(key.ty.shape[1]) == (2 if name == "grouped queries" else 1)


def test_a_fully_masked_row_gives_zero_not_nan(table):
    _, got, _ = table
    assert (got["fully masked row"][:, :, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sdpa_in_half_precision(dtype):
    args = tuple(x.to(dtype) for x in qkv())
    assert error_against_torch(Sdpa(mask=kept()), args) < (4e-3 if dtype is torch.float16 else 3e-2)


def test_active_dropout_is_refused():
    with pytest.raises(UnsupportedError, match=r"dropout_p=0.3: call model\.eval\(\)"):
        import_model(Sdpa(dropout_p=0.3), qkv())


def test_double_precision_attention_is_refused():
    with pytest.raises(UnsupportedError, match="dtype float64"):
        import_model(Sdpa(), tuple(x.double() for x in qkv()))


# -- attention by hand stays as operators, each softmax with its site -----------------------------------------------

HANDS = ("add", "masked_fill", "where", "einsum", "baddbmm")


class Hands(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({hand: ByHand(hand, kept()) for hand in HANDS})

    def forward(self, q, k, v):
        return {hand: layer(q, k, v) for hand, layer in self.layers.items()}


def test_attention_by_hand():
    imported = import_model(Hands(), qkv())
    assert softmax_sites(imported.mod) == [f"layers.{hand}" for hand in HANDS]
    names = operator_names(imported.mod)
    assert names.count("matmul") == 2 * len(HANDS) and "einsum" not in names and not attention_sites(imported.mod)
    assert error_against_torch(Hands(), qkv(), imported=imported) < 2e-6


class Nested(nn.Module):
    """A softmax module, two attentions in one module, and a module called twice."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.softmax = nn.Softmax(dim=-1)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x):
            return self.dropout(self.softmax(x @ x.mT)) @ x

    class Pair(nn.Module):
        def forward(self, x):
            return sdpa(x, x, x) + (x @ x.mT).softmax(-1) @ x

    def __init__(self):
        super().__init__()
        self.own, self.pair = self.Attention(), self.Pair()

    def forward(self, x):
        return sdpa(self.own(x), self.pair(x), self.own(x))


def test_sites_are_module_paths_and_unique():
    imported = import_model(Nested(), (torch.randn(2, 3, 4, 8),))
    assert softmax_sites(imported.mod) == ["own", "pair#1", "own#1"]
    assert list(attention_sites(imported.mod)) == ["pair", ""]


# -- nn.MultiheadAttention and what is built on it ------------------------------------------------------------------

LEFT_OUT = ~kept()
PADDED = torch.tensor([[False] * 8, [False] * 5 + [True] * 3])
MULTIHEAD = {
    "plain": {"need_weights": False},
    "bool mask means left out": {"need_weights": False, "attn_mask": LEFT_OUT},
    "float mask": {"need_weights": False, "attn_mask": 3.0 * LEFT_OUT},
    "mask by head": {"need_weights": False, "attn_mask": LEFT_OUT.expand(8, 8, 8)},
    "key padding": {"need_weights": False, "key_padding_mask": PADDED},
    "both masks": {"need_weights": False, "attn_mask": LEFT_OUT, "key_padding_mask": PADDED},
    "causal": {"need_weights": False, "attn_mask": torch.ones(8, 8).triu(1).bool(), "is_causal": True},
    "weights": {"need_weights": True},
    "weights by head": {"need_weights": True, "attn_mask": LEFT_OUT, "average_attn_weights": False},
    "weights, both masks": {"need_weights": True, "attn_mask": LEFT_OUT, "key_padding_mask": PADDED},
}


class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in MULTIHEAD)

    def forward(self, x):
        return {name: layer(x, x, x, **MULTIHEAD[name]) for name, layer in zip(MULTIHEAD, self.layers)}


@pytest.fixture(scope="module")
def multihead():
    torch.manual_seed(0)
    model, args = Multihead().eval(), (torch.randn(2, 8, 32),)
    imported = import_model(model, args)
    return imported, compile_imported(imported)(*args), model(*args)


@pytest.mark.parametrize("case", MULTIHEAD)
def test_multihead_attention(case, multihead):
    imported, got, expected = multihead
    whole = f"layers.{list(MULTIHEAD).index(case)}" in attention_sites(imported.mod)
    assert whole is not MULTIHEAD[case]["need_weights"]
    assert largest_error(got[case], expected[case]) < 2e-6


def test_softmax_of_multihead_attention_that_returns_weights_has_its_site(multihead):
    assert softmax_sites(multihead[0].mod) == ["layers.7", "layers.8", "layers.9"]


def test_transformer_encoder_with_masks():
    """torch.export alone cannot: the encoder compares the mask's values."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    args, kwargs = (torch.randn(2, 8, 32),), {"mask": LEFT_OUT, "src_key_padding_mask": PADDED}
    imported = import_model(model, args, kwargs)
    assert list(attention_sites(imported.mod)) == ["layers.0.self_attn", "layers.1.self_attn"]
    got, expected = compile_imported(imported)(*args, **kwargs), model(*args, **kwargs)
    valid = ~PADDED  # PyTorch's fast path zeroes the padding, its slow one does not
    assert (got - expected)[valid].abs().max() < 4e-6


def test_transformer_decoder_layer():
    torch.manual_seed(0)
    model = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True).eval()
    args = (torch.randn(2, 8, 32), torch.randn(2, 6, 32))
    kwargs = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(8), "tgt_is_causal": True}
    imported = import_model(model, args, kwargs)
    assert list(attention_sites(imported.mod)) == ["self_attn", "multihead_attn"]
    assert error_against_torch(model, args, kwargs, imported=imported) < 4e-6
