"""The windowed attention of transformers' Longformer and LED, in a form that can be exported: one masked attention.

Their layers compute softmax(q kᵀ / √d) v over the keys within a window of each token and over the tokens with global
attention, in overlapping chunks, and find these tokens by their values, which an export cannot.  While a model is
exported, a layer computes the same in another way:

    a token          over the keys |i - j| <= window // 2 and those of tokens with global attention
    a global token   over all keys, by projections of its own (query_global, key_global, value_global)
    a padded token   gives 0, and no token sees its key

The tokens with global attention are those of the example call, so the masks are constants.  In a call with others the
result is NaN throughout.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

CLASSES = (
    ("transformers.models.longformer.modeling_longformer", "LongformerSelfAttention"),
    ("transformers.models.led.modeling_led", "LEDEncoderSelfAttention"),
)
NOTE = (
    "global attention in windowed layers is of {} in each sequence, as in the example inputs: "
    "a call that asks for it elsewhere gives NaN"
)


def windowed_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model with windowed attention, unless their class overrides what it computes."""
    kinds = [getattr(sys.modules[module], name) for module, name in CLASSES if module in sys.modules]
    return [
        module
        for module in model.modules()
        if any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)
    ]


def global_tokens(model: torch.nn.Module, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Which tokens have global attention in a call of the model, bool (batch or 1, length).

    None without windowed layers, and for a call that fails.  The call ends at the first of them.
    """
    layers = windowed_layers(model)
    if not layers:
        return None
    found: list[torch.Tensor] = []

    def stop(_layer, positional, named):
        found.append(named["is_index_global_attn"] if "is_index_global_attn" in named else positional[3])
        raise _Found

    hooks = [layer.register_forward_pre_hook(stop, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad(), contextlib.suppress(Exception):  # an export says what is wrong with the call
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        return None
    tokens = found[0].cpu()
    return tokens[:1] if bool((tokens == tokens[:1]).all()) else tokens


def note(tokens: torch.Tensor | None) -> tuple[str, ...]:
    """What the report says of `global_tokens`."""
    if tokens is None:
        return ()
    counts = sorted({int(n) for n in tokens.sum(-1)})
    return (NOTE.format("no token" if counts == [0] else f"{' or '.join(map(str, counts))} tokens"),)


@contextlib.contextmanager
def exportable_windows(model: torch.nn.Module, tokens: torch.Tensor | None) -> Iterator[None]:
    """A context in which an export of `model` finds masked attention in its windowed layers.

    `tokens` is what `global_tokens` gave.  Calls that are no export compute what they always do.
    """
    layers = [] if tokens is None else windowed_layers(model)
    places = [] if tokens is None or not tokens.any() else tokens.tolist()
    for number, layer in enumerate(layers):
        layer.forward = functools.partial(_forward, layer, places, number == 0)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(
    layer,
    places: list[list[bool]],
    is_first: bool,
    hidden_states,  # (B, S, C)
    attention_mask=None,
    is_index_masked=None,  # bool (B, S)
    is_index_global_attn=None,  # bool (B, S)
    is_global_attn=None,
    output_attentions=False,
):
    if output_attentions or not torch.compiler.is_exporting():
        return type(layer).forward(
            layer,
            hidden_states,
            attention_mask,
            is_index_masked,
            is_index_global_attn,
            is_global_attn,
            output_attentions,
        )
    batch, length, width = hidden_states.shape
    index = torch.arange(length, device=hidden_states.device)
    seen = ~is_index_masked[:, None, None, :]
    near = (index[:, None] - index[None, :]).abs() <= layer.one_sided_attn_window_size
    expected = torch.tensor(places or [[False] * length], device=hidden_states.device)

    def attend(suffix, keep):
        projections = (getattr(layer, name + suffix) for name in ("query", "key", "value"))
        q, k, v = (f(hidden_states).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for f in projections)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep & seen)

    out = attend("", near | expected[:, None, None, :])
    if places:
        rows = expected[:, None, :, None]
        out = torch.where(rows, attend("_global", rows), out)
    out = out.transpose(1, 2).reshape(batch, length, width).masked_fill(is_index_masked[:, :, None], 0)
    if is_first:  # the layers after it take its result
        out = out.masked_fill((is_index_global_attn != expected).any(), torch.nan)
    return (out,)


class _Found(Exception):
    """The first windowed layer of a call was reached."""
