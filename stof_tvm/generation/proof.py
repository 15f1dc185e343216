"""Proof that a Decoder computes what its model does: padding behind a prompt reaches nothing, nor do old keys."""

import copy
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from stof_tvm.generation.buckets import least_length
from stof_tvm.generation.decoder import Decoder
from stof_tvm.generation.parts import in_parts
from stof_tvm.verification.comparison import judge
from stof_tvm.verification.verify import WIDER
from tir_kernels.errors import VerificationError

STEPS = 2  # tokens after a prompt that are compared
LONGEST = 256  # prompt of a Decoder in PyTorch: a CPU takes minutes for thousands of tokens


@torch.no_grad()
def prove(call: Callable, model: PreTrainedModel, sizes, room: int, steps: int) -> None:
    """Compare a Decoder, or engines of it, with its model on prompts without padding and on tokens after them.

    Parameters
    ----------
    call : callable
        `call(ids, lengths)` is what the Decoder computes, of all sequences.
    model : PreTrainedModel
    sizes : Sizes
    room : int
        The length that the prompts are padded to, by other tokens.
    steps : int
        How many tokens after them are computed.

    Raises VerificationError where they differ by more than roundings.
    """
    numbers = torch.Generator().manual_seed(room)
    ids = torch.randint(sizes.vocabulary, (sizes.batch, room + steps), generator=numbers)
    count = max(least_length(room, sizes.buckets), min(2 * room // 3, sizes.max_length - steps))
    text = ids[:, :count]  # what follows it was padding
    check(call(ids[:, :room], torch.full((sizes.batch,), count)), model, text, "with padding behind a prompt")
    for step in range(min(steps, sizes.max_length - count)):
        token = ids[:, room + step : room + step + 1]
        text = torch.cat([text, token], 1)
        check(call(token, torch.ones_like(token[:, 0])), model, text, f"{text.shape[1] - count} tokens after it")


@torch.no_grad()
def prove_decoder(decoder: Decoder, sizes) -> None:
    """`prove` of a Decoder in PyTorch, on short prompts; its modes and positions stay as they were.

    They are computed in the smallest parts that prompts of these sizes are: a model may tell sequences apart.
    """
    positions = decoder.positions.clone()
    training = [module for module in decoder.modules() if module.training]
    device = decoder.model.device
    try:
        decoder.eval()
        room, part = min(sizes.buckets[0], LONGEST), min(map(sizes.part_of, sizes.buckets))
        prove(
            lambda ids, n: in_parts(decoder, ids.to(device), n.to(device), sizes.batch if ids.shape[1] == 1 else part),
            *(decoder.model, sizes, room, STEPS),
        )
    finally:
        for module in training:
            module.training = True
        decoder.positions.copy_(positions)


@torch.no_grad()
def check(logits: torch.Tensor, model: PreTrainedModel, ids: torch.Tensor, where: str) -> None:
    """VerificationError unless `logits` (batch, vocabulary) are, but for roundings, what a model has after `ids`."""

    def compute(model):
        return model(ids.to(model.device), use_cache=False).logits[:, -1]

    def wider():
        return compute(copy.deepcopy(model).to(WIDER[expected.dtype]))

    expected = compute(model)
    verdict = judge(logits.to(expected.device), expected, wider, lambda: None)
    if not verdict.is_right:
        raise VerificationError(
            f"{type(model).__name__} computes other logits {where} than on the text alone: {verdict}.  Prompts are "
            "padded behind their last token, which only a causal model does not read"
        )
