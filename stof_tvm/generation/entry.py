"""`generate`: text in one line, with engines that later calls use again."""

import threading
from typing import Any, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from stof_tvm.generation.building import check_model, engines
from stof_tvm.generation.choosing.loop import generated
from stof_tvm.generation.generator import Generator
from stof_tvm.generation.prompts import checked_ids
from stof_tvm.given_masks import without_sizes
from stof_tvm.running.gpus import current_device
from tir_kernels.errors import InputError
from tir_kernels.target import parse_target

LEAST_LENGTH = 256  # of the caches that `generate` makes
MOST_GENERATORS = 4  # of each model


def generate(
    model: PreTrainedModel | Generator,
    ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    target=None,
    mask=None,
    **options,
) -> torch.Tensor:
    """Prompts and what a causal language model says after them, int64 (batch, tokens), as transformers' `generate`.

    The first call with a model builds engines, for a prompt and for tokens, which takes seconds to minutes; later ones
    use them again, until a weight of the model changes.  There is one more engine for each length that prompts are
    padded to, and new ones for another number of sequences, and where a text gets longer than 256 tokens, or than the
    next power of two, so let the first call be the longest, or make a Generator yourself.

    Parameters
    ----------
    model : PreTrainedModel or Generator
        A causal language model of transformers, or what `stof_tvm.generation.engines` made of one.
    ids : torch.Tensor
        int64 (batch, tokens), where the engines run.
    attention_mask : torch.Tensor, optional
        (batch, tokens), 0 at padding, which is on the left.
    input_ids : torch.Tensor, optional
        `ids` under the name that tokenizers give them: `generate(model, **tokenizer(texts, return_tensors="pt"))`.
    target, mask : optional
        As `build` takes them, for a model.  A mask's rows and columns are positions; it restricts the model's own.
    **options
        Those of transformers' `generate`: max_new_tokens, streamer, do_sample, temperature, top_k, top_p, eos_token_id,
        generation_config, logits_processor, stopping_criteria and so on.

    Raises
    ------
    StofError
        What `stof_tvm.generation.engines` raises; InputError for ids that do not fit and for a text longer than the
        model or the Generator takes; UnsupportedError for beams.
    """
    if (ids is None) == (input_ids is None):
        raise InputError("generate takes ids, or input_ids in their place")
    ids = cast(torch.Tensor, input_ids if ids is None else ids)
    if isinstance(model, Generator):
        if target is not None or mask is not None:
            raise InputError("a Generator has its target and mask already: give them to stof_tvm.generation.engines")
        return model.generate(ids, attention_mask, **options)
    check_model(model)
    target = parse_target(target)
    device = current_device(target.kind.name)
    if device.type == model.device.type == "cuda":
        device = model.device
    vocabulary = model.get_input_embeddings().num_embeddings
    checked_ids(ids, vocabulary, device)

    def generator_for(batch: int, length: int) -> Generator:
        return _known_of(model).generator(model, batch, length, target, mask, device)

    return generated(ids, attention_mask, model.generation_config, vocabulary, generator_for, options)


class _Known:
    """The Generators of a model whose weights are as they were, the latest last."""

    def __init__(self, weights: list):
        self.weights = weights
        self._generators: dict[tuple, Generator] = {}
        self._building = threading.Lock()

    def generator(self, model: PreTrainedModel, batch: int, length: int, target, mask, device) -> Generator:
        key = batch, str(target), device, None if mask is None else _identity(mask)
        with self._building:
            known = self._generators.get(key)
            if known is None or known.sizes.max_length < length:
                room = _room(length, getattr(model.config.get_text_config(), "max_position_embeddings", None))
                known = engines(model, max_length=room, batch=batch, target=target, mask=mask)
            self._generators.pop(key, None)
            self._generators[key] = known
            for oldest in list(self._generators)[:-MOST_GENERATORS]:
                del self._generators[oldest]
        return known


def _identity(mask) -> Any:
    """What equal masks, or dicts of masks by path, have in common."""
    if isinstance(mask, dict):
        return tuple((path, without_sizes(given).identity) for path, given in mask.items())
    return without_sizes(mask).identity


def _room(length: int, most: int | None) -> int:
    """The length of a new cache: a power of two, or the model's positions if these are less."""
    if most is not None and length > most:
        raise InputError(f"prompt and new tokens are {length}, and the model has {most} positions")
    room = max(LEAST_LENGTH, 1 << (length - 1).bit_length())
    return room if most is None else min(room, most)


_known = WeakIdKeyDictionary()  # model -> _Known
_knowing = threading.Lock()


def _known_of(model: PreTrainedModel) -> _Known:
    tensors = [*model.parameters(), *model.buffers()]
    weights = [(x.data_ptr(), None if x.is_inference() else x._version) for x in tensors]
    with _knowing:
        known = _known.get(model)
        if known is None or known.weights != weights:
            known = _known[model] = _Known(weights)
        return known
