"""Models of transformers that read some rows of their last layer: it is computed for these rows."""

import pytest
import torch
import transformers
from torch import nn

import stof_tvm
from relax_passes.pipeline import run_pipeline
from stof_tvm import compiler, masks
from stof_tvm.generation.decoder import Decoder
from stof_tvm.site_masks import SiteMasks
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.read_rows.layers import SELECTIONS, WIDTH, Reader
from tests.relax_passes.read_rows.programs import product_rows

BATCH, LENGTH = 2, 16
SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
IDS = torch.randint(3, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
PADDED = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])).long()
FIRST = torch.zeros(1, dtype=torch.int64)  # the first of the sequences whose prompts these are
IMAGE = torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Logits(nn.Module):
    """The logits of a prompt's last tokens."""

    def __init__(self, model, count):
        super().__init__()
        self.model, self.count = model, count

    def forward(self, ids):
        return self.model(ids, logits_to_keep=self.count, use_cache=False).logits


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1)).eval()


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))


def vit():
    sizes = {name: n for name, n in SIZES.items() if name != "vocab_size"}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=4))


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2ForSequenceClassification(config)


def clip():
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(**SIZES, max_position_embeddings=32, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    )


def decoder(batch):
    return Decoder(llama(), [((batch, 1, 24, 8),) * 2] * 2, torch.float32, one_position=batch == 1)


CASES = {  # model, arguments, queries of the last attention, and the rows of the product of its MLP
    "a classifier by the first token": (bert, (IDS, PADDED), 1, BATCH),
    "a classifier of images": (vit, (IMAGE,), 1, BATCH),
    "the last token's logits": (lambda: Logits(llama(), 1), (IDS,), 1, BATCH),
    "the last tokens' logits": (lambda: Logits(llama(), 3), (IDS,), 3, 3 * BATCH),
    "a prompt": (lambda: decoder(1), (IDS[:1], torch.tensor([11]), FIRST), 1, 1),
    "prompts of several lengths": (lambda: decoder(2), (IDS, torch.tensor([11, 16]), FIRST), 1, BATCH),
}


@pytest.fixture
def imports(monkeypatch) -> list:
    """What builds import, for those who look at it, too."""
    found, import_model = [], compiler.import_model

    def note(*given, **options):
        found.append(import_model(*given, **options))
        return found[-1]

    monkeypatch.setattr(compiler, "import_model", note)
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mask", [None, masks.sliding_window(5)])
def test_the_last_layer_is_computed_for_the_rows_that_are_read(name, mask, imports):
    make, args, queries, rows = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    engine = stof_tvm.build(model, QUICK_LLVM, args, mask, tuning_logs=False)
    report = engine.report()
    assert report.verification.result == "passed"
    if mask is not None and name == "prompts of several lengths":  # no kernel has rows of a mask for each entry
        queries = LENGTH
    assert [site.shape.q_len for site in report.rewritten][1:] == [queries]
    found = product_rows(run_pipeline(imports[0].mod, QUICK_LLVM, SiteMasks(mask), until="read_rows"))
    assert found.count(rows) >= 4


@pytest.mark.parametrize("make", [gpt2, clip])
def test_rows_that_follow_from_the_tokens(make):
    """The last one that is no padding, and the one that ends a text."""
    torch.manual_seed(0)
    model, ids = make().eval(), IDS.clone()
    ids[1, 12:] = 0
    ids[:, 7] = 2
    engine = stof_tvm.build(model, QUICK_LLVM, (ids,), tuning_logs=False)
    assert engine.report().verification.result == "passed"


def test_caches_have_all_keys_and_values():
    torch.manual_seed(0)
    model = decoder(2).eval()
    args = IDS, torch.tensor([11, 16]), FIRST
    engine = stof_tvm.build(model, QUICK_LLVM, args, tuning_logs=False)
    with torch.no_grad():
        assert torch.allclose(engine(*args), model(*args), atol=1e-5)
    for name in ("keys_1", "values_1"):
        assert torch.allclose(engine.state[name][:, :, :LENGTH], getattr(model, name)[:, :, :LENGTH], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the last row", "gather"])
@pytest.mark.parametrize("window", [None, 3])
def test_ranges_of_lengths_read_the_row_of_each_length(how, window):
    mask = None if window is None else masks.sliding_window(window)
    model, plain = (Reader(SELECTIONS[how][0], causal=True).eval() for _ in range(2))
    example = torch.randn(BATCH, 16, WIDTH), torch.tensor([7, 2])
    shapes = {"x": {1: torch.export.Dim("length", min=4, max=40)}, "index": None}
    engine = stof_tvm.build(model, QUICK_LLVM, example, mask, dynamic_shapes=shapes, buckets=[16, 40])
    for length in (9, 16, 21):
        x, index = torch.randn(BATCH, length, WIDTH), torch.tensor([3, length - 1])
        for layer in plain.layers if mask is not None else ():
            layer.causal, layer.own_mask = False, (mask & masks.causal()).dense(length)
        assert torch.allclose(engine(x, index), plain(x, index), atol=2e-6)


def test_tokens_in_another_order_are_read_where_they_are():
    tiles = masks.sliding_tile((3, 4), (3, 2), (3, 2), order="row-major")
    example = torch.randn(BATCH, 12, WIDTH), torch.tensor([7, 2])
    report = stof_tvm.build(Reader(SELECTIONS["gather"][0]).eval(), QUICK_LLVM, example, tiles).report()
    assert report.verification.result == "passed"
    assert all(any("order of the mask's tiles" in note for note in site.notes) for site in report.rewritten)


def test_masks_that_are_replaced_later_have_all_rows():
    example = torch.randn(BATCH, 12, WIDTH), torch.tensor([7, 2])
    model = Reader(SELECTIONS["the first row"][0]).eval()
    engine = stof_tvm.build(model, QUICK_LLVM, example, masks.sliding_window(5), replaceable_masks=True)
    other = stof_tvm.build(model, QUICK_LLVM, example, masks.sliding_window(2))
    assert torch.allclose(engine.with_mask(masks.sliding_window(2))(*example), other(*example), atol=2e-6)
