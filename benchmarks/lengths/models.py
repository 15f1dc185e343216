"""The measured models and their inputs: an encoder, a decoder, and a rotary gated encoder with local attention."""

from dataclasses import replace

import torch
from torch import nn

from benchmarks.lengths.cases import BATCH, LengthCase, Sizes
from benchmarks.zoo.make import transformers_model
from benchmarks.zoo.models import MODELS as ZOO
from benchmarks.zoo.models import ZooModel

TABLE = 4096  # positions; the tiny models have as many

LENGTH_MODELS = {
    "BERT-base": ZooModel("BERT-base", "BertModel", (), {"max_position_embeddings": TABLE}),
    "GPT-2": ZooModel("GPT-2", "GPT2Model", (), {"n_positions": TABLE}, layers=("n_layer",), tiny={"n_embd": 64}),
    "ModernBERT-base": replace(ZOO["ModernBERT-base"], shapes=()),
}
CAUSAL = ("GPT-2",)  # their tokens never see what is padded after them


class HiddenState(nn.Module):
    """A model as a function of token ids and, where sequences are padded, of which tokens are real."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids, attention_mask=None):
        mask = {} if attention_mask is None else {"attention_mask": attention_mask}
        return self.model(input_ids=ids, **mask).last_hidden_state


def make_model(case: LengthCase, small: bool) -> HiddenState:
    """The case's model in its dtype, on the CPU, with transformers' "sdpa" attention; `small` makes two layers."""
    return HiddenState(transformers_model(LENGTH_MODELS[case.model], case.dtype, "sdpa", small)).eval()


def make_inputs(case: LengthCase, count: int, device: str, sizes: Sizes) -> list[tuple[torch.Tensor, ...]]:
    """(ids,) of each call, int64 (batch, length), or (ids, mask) of a batch of unequal lengths; 1 is a real token."""
    generator = torch.Generator().manual_seed(0)
    low, high = LENGTH_MODELS[case.model].ids
    calls = []
    for number in range(count):
        ids = torch.randint(low, high, (case.batch, case.length), generator=generator)
        if case.kind == BATCH:
            lengths = torch.tensor(sizes.batch_lengths(number))
            mask = (torch.arange(case.length) < lengths[:, None]).long()
            calls.append(((ids * mask).to(device), mask.to(device)))
        else:
            calls.append((ids.to(device),))
    return calls
