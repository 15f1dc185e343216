"""From a causal language model of transformers to the engines that generate."""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from stof_tvm.compiler import build
from stof_tvm.generation import parts
from stof_tvm.generation.buckets import buckets_to, checked
from stof_tvm.generation.decoder import Decoder
from stof_tvm.generation.frequencies import refuse_other_states, refuse_switches
from stof_tvm.generation.generator import Generator, Sizes
from stof_tvm.generation.masks_of_positions import depends_on_entry, masks_of_positions, windows_of_layers
from stof_tvm.generation.positions import mask_functions
from stof_tvm.generation.proof import prove_decoder
from stof_tvm.range_engine import RangeEngine
from tir_kernels.errors import InputError, NotRewrittenError, StofError, UnsupportedError

IMPLEMENTATIONS = ("sdpa", "eager", None)
# Arguments of `build` that are not for callers of `engines`.
OWN = {"model", "example_inputs", "example_kwargs", "dynamic_shapes", "lazy", "buckets", "without_padding"}


def engines(
    model: PreTrainedModel,
    *,
    max_length: int,
    batch: int = 1,
    prompt: Sequence[int] | int | None = None,
    target=None,
    mask=None,
    **options,
) -> Generator:
    """Engines that generate text with a causal language model of transformers.

    Parameters
    ----------
    model : PreTrainedModel
        In float32, float16 or bfloat16.  It is copied; later training does not reach the engines.
    max_length : int
        Tokens of a prompt and of what is generated, together: the caches' length.
    batch : int
        Sequences that are generated at once.  Their prompts are computed some after others where they are padded to
        more than 65,536 tokens, unless a mask that is given depends on the batch entry.
    prompt : int or sequence of int, optional
        Lengths that prompts are padded to, from 2 to `max_length`; their engines are built now.  By default every
        prompt fits, is padded by at most a fifth or 64 tokens, and the engine of a length is built at its first prompt.
        With windows, a prompt longer than the length before its own is computed in part only (docs/generation.md).
    target, mask
        As `build` takes them.  A mask's rows and columns are positions, 0 to `max_length` - 1.
    **options
        Others of `build`: `verify`, `tuning_logs`, `float32`, `progress` and so on.

    Raises
    ------
    StofError
        InputError for lengths that do not fit the model, UnsupportedError for a model that is no causal language model
        with a cache of keys and values, VerificationError for one that reads what follows a token, and what `build`
        raises.
    TypeError
        Options that `build` has not, or that are not the caller's here, as `dynamic_shapes`.
    """
    for name in options:
        if name in OWN or name not in inspect.signature(build).parameters:
            raise TypeError(f"engines() got an unexpected keyword argument {name!r}")
    check_model(model)
    _check_sizes(model, max_length, batch)
    refuse_switches(model, max_length)
    buckets = buckets_to(max_length) if prompt is None else checked(prompt, max_length)
    shapes, dtype, functions = _caches(model, batch, max_length)
    own = {path: function for path, function in functions.items() if function is not None}
    one_position = batch == 1 or mask is not None
    heads = model.config.get_text_config().num_attention_heads
    masks = masks_of_positions(mask, own if one_position else {}, batch, heads, max_length)
    windows = windows_of_layers(model, [*functions], masks, (batch, heads, max_length, max_length), len(shapes))
    decoder = Decoder(model, shapes, dtype, one_position, windows, buckets)
    vocabulary = model.get_input_embeddings().num_embeddings
    # A part of the prompts would have the mask of the batch's first entries.
    most_tokens = None if depends_on_entry(masks) else parts.MOST_TOKENS
    sizes = Sizes(max_length, batch, vocabulary, buckets, decoder.one_position, most_tokens)
    with _explained(model):
        prove_decoder(decoder, sizes)

    def built(masks) -> RangeEngine:
        step = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        call = step, step[:, 0] + 1, step[0]
        lazy = build(
            *(decoder, target, call, masks),
            dynamic_shapes=_dynamic_shapes(sizes),
            lazy=True,
            **options,
        )
        engine = lazy.engine_for(*call)  # type: ignore[attr-defined]  # it is a RangeEngine
        refuse_other_states(model, [state.name for state in engine.signature.states])
        return cast(RangeEngine, lazy)

    try:
        lazy = built(masks)
    except NotRewrittenError:
        if mask is not None or not own:
            raise
        lazy = built(None)  # a kernel that reads all keys, for the model masks them anyway
    decoder.release()
    compares = options.get("verify", True) and mask is None
    return Generator(lazy, sizes, compares, () if prompt is None else buckets)


def _dynamic_shapes(sizes: Sizes) -> dict:
    """The ranges of a Decoder's inputs, as torch.export takes them."""
    tokens = torch.export.Dim("tokens", min=1, max=sizes.max_length)
    if not sizes.has_parts:
        return {"ids": {1: tokens}, "lengths": None, "first": None}
    sequences = torch.export.Dim("sequences", min=1, max=sizes.batch)
    return {"ids": {0: sequences, 1: tokens}, "lengths": {0: sequences}, "first": None}


@contextlib.contextmanager
def _explained(model: PreTrainedModel) -> Iterator[None]:
    """UnsupportedError where PyTorch fails, as for positions of their own or a cache that the model has no use for."""
    try:
        yield
    except StofError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UnsupportedError(
            f"{type(model).__name__} does not compute tokens after one another, each sequence at its own position and "
            f"with a cache that is given: {told}"
        ) from error


def check_model(model) -> None:
    """UnsupportedError unless `model` is a decoder of transformers with logits for each token."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"generate takes a causal language model of transformers, got a {type(model).__name__}")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{name} is an encoder with a decoder: generate takes decoders, causal language models")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedError(f"{name} gives no logits of tokens: generate takes causal language models, …ForCausalLM")
    implementation = model.config.get_text_config()._attn_implementation
    if implementation not in IMPLEMENTATIONS:
        raise UnsupportedError(
            f"{name} has attn_implementation={implementation!r}: load it with 'sdpa' or 'eager', and give a mask to "
            "engines(mask=…)"
        )


def _check_sizes(model: PreTrainedModel, max_length, batch) -> None:
    if type(batch) is not int or batch < 1:
        raise InputError(f"batch must be a whole number from 1 on, got {batch!r}")
    if type(max_length) is not int or max_length < 2:
        raise InputError(f"max_length must be a whole number from 2 on, got {max_length!r}")
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and max_length > most:
        raise InputError(f"max_length={max_length} is more than the model's {most} positions")


def _caches(model: PreTrainedModel, batch: int, length: int) -> tuple[list, torch.dtype, dict]:
    """(shapes of each layer's keys and values, their dtype, functions of masks by attention or None), from a call.

    UnsupportedError for other caches.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.no_grad(), _explained(model):
        functions = mask_functions(model, lambda: model(ids, past_key_values=cache, use_cache=True))
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer):
            raise UnsupportedError(
                f"{type(model).__name__} does not keep keys and values of each token only: a layer has a "
                f"{type(layer).__name__}"
            )
    if not cache.layers or any(layer.keys is None for layer in cache.layers):
        raise UnsupportedError(f"{type(model).__name__} keeps no keys and values in the cache that it is given")
    shapes = [tuple((batch, x.shape[1], length, x.shape[3]) for x in (y.keys, y.values)) for y in cache.layers]
    return shapes, cache.layers[0].keys.dtype, functions
