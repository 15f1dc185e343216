"""Whole models, padded with poison, and compositions of operators at random."""

import random

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.export import Dim

from stof_tvm.buckets.exports import export_of_program
from stof_tvm.frontend.export import export_model
from stof_tvm.frontend.shape_range import range_of_program
from tests.stof_tvm.frontend.padding.poison import Model, assert_same, exported, run_poisoned

SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=30)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
MODERN = dict(cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2, local_attention=6)


def ids(batch, length):
    return torch.randint(0, 30, (batch, length), generator=torch.Generator().manual_seed(length))


def padding(batch, length):
    kept = torch.arange(length)[None] < torch.tensor([[length], [max(1, length // 2)], [2], [1]])[:batch]
    return {"input_ids": ids(batch, length), "attention_mask": kept.long()}


def bert(**options):
    return transformers.BertModel(transformers.BertConfig(**SMALL, **options))


def modernbert():
    config = transformers.ModernBertConfig(**{**SMALL, "num_hidden_layers": 2}, **TOKENS, **MODERN)
    return transformers.ModernBertModel(config)


def gpt2(head=transformers.GPT2LMHeadModel):
    sizes = dict(n_embd=16, n_layer=1, n_head=2, vocab_size=30, n_positions=64)
    return head(transformers.GPT2Config(**sizes, **TOKENS, num_labels=2))


def llama():
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, **TOKENS)
    return transformers.LlamaForCausalLM(config)


def t5():
    sizes = dict(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=30)
    return transformers.T5EncoderModel(transformers.T5Config(**sizes))


def distilbert():
    config = transformers.DistilBertConfig(dim=16, n_layers=1, n_heads=2, hidden_dim=24, vocab_size=30)
    return transformers.DistilBertForSequenceClassification(config)


class Speech(nn.Module):
    """A stem of convolutions as Wav2Vec2 has it, positions by a convolution, an encoder layer, and a mean over time."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, 16, 10, 5), nn.GELU(), nn.Conv1d(16, 16, 3, 2), nn.GELU())
        self.norm, self.place = nn.LayerNorm(16), nn.Conv1d(16, 16, 4, padding=2, groups=4)
        self.layer, self.head = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), nn.Linear(16, 3)

    def forward(self, x):
        x = self.norm(self.stem(x[:, None]).mT)
        x = x + F.gelu(self.place(x.mT)[..., :-1]).mT
        return self.head(self.layer(x).mean(1))


def signals(batch, length):
    return {"x": torch.randn(batch, length * 16, generator=torch.Generator().manual_seed(length))}


def texts(batch, length):
    return {"input_ids": ids(batch, length)}


MODELS = {
    "BERT": (bert, texts), "BERT with padding": (bert, padding), "ModernBERT": (modernbert, texts),
    "GPT-2": (gpt2, texts), "LLaMA": (llama, texts), "LLaMA with padding": (llama, padding), "T5": (t5, padding),
    "GPT-2 classifies the last token": (lambda: gpt2(transformers.GPT2ForSequenceClassification), texts),
    "DistilBERT classifies": (distilbert, padding), "speech": (Speech, signals),
}  # fmt: skip


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_whole_models(name):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().eval()
    length = Dim("length", min=4, max=60)
    dims = {0: Dim("batch", min=2, max=4), 1: length if inputs is not signals else 16 * length}
    example = inputs(3, 7)
    if hasattr(model, "config"):
        model.config.use_cache = False
    program = export_model(model, (), example, None, {name: dims for name in example})
    shapes = range_of_program(program)
    functional = export_of_program(program, shapes, None).program
    for batch, real, bucket in ((2, 5, 8), (3, 20, 48), (4, 16, 16)):
        given = inputs(batch, real)
        values = shapes.signature.arguments((), given)
        sizes = [4, bucket] if str(shapes.shapes[0][0]) == str(shapes.symbols[0]) else [bucket, 4]
        found = run_poisoned(functional, shapes, values, sizes)
        expected = model(**given)
        if isinstance(expected, dict):
            expected = [x for x in expected.values() if isinstance(x, torch.Tensor)]
        assert_same([x for x in found if isinstance(x, torch.Tensor)], expected)


STEPS = {  # from (batch, length, 6) to the same; `n` is a random number
    "scale": lambda m, x, n: x * (n + 1) / x.shape[1],
    "linear": lambda m, x, n: m.linear(x),
    "norm": lambda m, x, n: m.norm(x),
    "gelu": lambda m, x, n: F.gelu(x),
    "attention": lambda m, x, n: F.scaled_dot_product_attention(x, x.flip(-1), x, is_causal=bool(n % 2)),
    "softmax": lambda m, x, n: torch.softmax(x @ x.mT, -1) @ x,
    "softmax over tokens": lambda m, x, n: x.softmax(1) * 3,
    "mean": lambda m, x, n: x - x.mean(1, keepdim=True),
    "standard deviation": lambda m, x, n: x / (1 + x.std(1, keepdim=True)),
    "largest": lambda m, x, n: x - x.amax(1, keepdim=True),
    "running": lambda m, x, n: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None],
    "convolution": lambda m, x, n: m.conv(x.mT).mT,
    "shift": lambda m, x, n: F.pad(x, (0, 0, n + 1, 0))[:, : x.shape[1]],
    "last": lambda m, x, n: x + x[:, -1:] - x[:, n : n + 1] * x[:, n, None],
    "positions": lambda m, x, n: x + m.table[: x.shape[1]],
    "rows": lambda m, x, n: m.linear(x.reshape(-1, 6)).view(x.shape),
    "heads": lambda m, x, n: x.unflatten(-1, (2, 3)).transpose(1, 2).softmax(-2).transpose(1, 2).flatten(2),
    "join": lambda m, x, n: m.linear(torch.cat([x[:, :1], x, x], 1))[:, 1 : x.shape[1] + 1],
    "roll": lambda m, x, n: x.roll(n, 1),
    "gate": lambda m, x, n: torch.where(x > x.mean((1, 2), keepdim=True), x, x.shape[1] / 10),
    "pairs": lambda m, x, n: (x[:, :, None] - x[:, None]).tanh().sum(1) / x.shape[1],
    "pooled": lambda m, x, n: x + F.max_pool2d(x.mT, (1, 3), 1, (0, 1)).mT,
    "chosen": lambda m, x, n: x + x.gather(1, (x > 0).long() + n).cos(),
}  # fmt: skip


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_random_compositions(seed):
    torch.manual_seed(seed)
    generator = random.Random(seed)
    steps = [(generator.choice(list(STEPS)), generator.randrange(3)) for _ in range(8)]
    parts = {
        "linear": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "conv": nn.Conv1d(6, 6, 3, padding=1),
        "table": nn.Parameter(torch.randn(64, 6)),
    }  # fmt: skip

    def compute(m, x):
        for name, n in steps:
            x = STEPS[name](m, x, n)
        return x, x.mean(1), x[:, -1], x.reshape(-1, 6).amax(0)

    model = Model(compute, **parts)
    program, shapes = exported(model, (torch.randn(3, 7, 6),), least=4)
    for batch, length, bucket in ((2, 5, 9), (3, 13, 16)):
        x = torch.randn(batch, length, 6)
        found = run_poisoned(program, shapes, [x], [3, bucket])
        assert_same(found, model(x))
