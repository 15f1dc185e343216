"""Models of transformers and of PyTorch without padding: each sequence as it is alone."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import stof_tvm
from stof_tvm import masks
from tests.models.quick_llvm import QUICK_LLVM

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
LONGEST = 16


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL, max_position_embeddings=LONGEST))


def modernbert():
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    config = transformers.ModernBertConfig(**SMALL, **ids, local_attention=8, global_attn_every_n_layers=2)
    return transformers.ModernBertModel(config)


def gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config)


def roberta():
    return transformers.RobertaModel(transformers.RobertaConfig(**SMALL, max_position_embeddings=LONGEST + 2))


def t5():
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99)
    return transformers.T5EncoderModel(config)


MASKS = {"gpt2": [masks.causal()], "modernbert": [None, masks.sliding_window(4)]}


@pytest.mark.slow
@pytest.mark.parametrize("make", [bert, modernbert, gpt2, roberta, t5], ids=lambda make: make.__name__)
def test_transformers(make):
    torch.manual_seed(0)
    model = make().eval()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    ids, place = torch.randint(3, 99, (3, LONGEST)), torch.arange(LONGEST)[None]
    mask = (place < torch.tensor([[LONGEST], [7], [1]])).long()
    engine = stof_tvm.build(model, QUICK_LLVM, {"input_ids": ids, "attention_mask": mask}, without_padding=True)
    assert engine.report().verification.result == "passed"
    mask = (place >= torch.tensor([[4], [13], [9], [0]])).long()  # padding on the left, and one more sequence
    ids = torch.randint(3, 99, (4, LONGEST))
    found = pytree.tree_leaves(engine(input_ids=ids, attention_mask=mask))
    for row in range(4):
        real = mask[row] == 1
        with torch.no_grad():
            alone = pytree.tree_leaves(model(input_ids=ids[row : row + 1, real]))
        for got, wanted in zip(found, alone, strict=True):
            got = got[row, real] if wanted.dim() == 3 else got[row]
            torch.testing.assert_close(got, wanted[0], rtol=2e-5, atol=2e-5)
    own = MASKS.get(make.__name__, [None])
    kinds = [compiled.packed.masks.values() for compiled in engine._rows.engines.entries.values()]
    assert set(kinds[0]) == set(own)


@pytest.mark.slow
def test_torch_encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(3, LONGEST, 32), torch.arange(LONGEST)[None] >= torch.tensor([[LONGEST], [5], [9]])
    call = {"src": x, "src_key_padding_mask": padding}
    engine = stof_tvm.build(encoder, QUICK_LLVM, call, without_padding=True)
    assert engine.report().verification.result == "passed"
    found = engine(**call)
    with torch.no_grad():
        torch.testing.assert_close(found[1, :5], encoder(x[1:2, :5])[0], rtol=2e-5, atol=2e-5)
    assert not found[1, 5:].any()
