"""Models whose rotary frequencies change with the length of a text, of which generation takes those that do not switch.

Keys of a cache are rotated already: where a longer text has other frequencies, they would have to be computed again.
And a prompt is padded, to a length that may lie beyond the switch where the prompt does not.
"""

from collections.abc import Iterable, Iterator

from torch import nn
from transformers import PreTrainedModel

from tir_kernels.errors import UnsupportedError


def refuse_switches(model: PreTrainedModel, max_length: int) -> None:
    """UnsupportedError where rotary frequencies change at or before `max_length` tokens."""
    for kind, most in _kinds(model):
        if most is None or most < max_length:
            fits = "" if most is None else f": max_length={max_length} must be at most {most}, where they change"
            raise UnsupportedError(
                f"{type(model).__name__} has rotary positions of type {kind!r}, whose frequencies change with a text's "
                f"length, while a cache holds keys that are rotated already{fits}"
            )


def refuse_other_states(model: PreTrainedModel, names: Iterable[str]) -> None:
    """UnsupportedError where a Decoder's engine updates buffers of the model other than rotary frequencies."""
    own = [name for name in names if name.startswith("model.") and name.removeprefix("model.") not in _tables(model)]
    if own:
        raise UnsupportedError(
            f"{type(model).__name__} updates its buffer {own[0].removeprefix('model.')!r} in forward: what a prompt's "
            "padding or another text left there would reach the tokens of this one"
        )


def _tables(model: nn.Module) -> set[str]:
    """The names of frequencies that `refuse_switches` looked at."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if hasattr(module, "rope_type")
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    }


def _kinds(model: nn.Module) -> Iterator[tuple[str, int | None]]:
    """(type, the longest text with the first frequencies) of each rotary table whose frequencies may change.

    None for the length where a model asks for it while it runs, which no export can.
    """
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            if isinstance(kind, str) and "dynamic" in kind:
                yield kind, None
            elif kind == "longrope":
                yield kind, _most(module, layer)


def _most(module: nn.Module, layer: str | None) -> int | None:
    """As `transformers.modeling_rope_utils.dynamic_rope_update` decides."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    parameters = parameters.get(layer, {}) if layer is not None else parameters
    return parameters.get("original_max_position_embeddings")
