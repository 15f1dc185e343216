"""Attention and masks of transformers for new tokens that stand at their own position in each sequence.

transformers makes masks for one position of all sequences, and applies a causal mask as a tensor while a model is
exported.  `at_positions` lets a model take the masks of `mask_at` instead, which are made of the same functions.  So
other calls of the model, in other threads, compute what they always do.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from stof_tvm.frontend.exportable.transformers_configs import Override

SDPA, EAGER = "stof_positions", "stof_added_positions"  # names of implementations
ATTRIBUTE = "_attn_implementation_internal"
OVERRIDES = Override(ATTRIBUTE, ("sdpa",), SDPA), Override(ATTRIBUTE, ("eager", None), EAGER)


class Seen:
    """Masks that were made, with their functions, and those that attentions were given."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[torch.Tensor, Callable]] = {}  # by the mask's id
        self.given: dict[torch.nn.Module, torch.Tensor | None] = {}


_seen: ContextVar[Seen | None] = ContextVar("seen", default=None)


def mask_at(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset=0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    is_added: bool = False,
    **others,
) -> torch.Tensor | None:
    """transformers' mask interface, where `q_offset` is a number or the position of each sequence, int64 (batch,).

    Other arguments are those of `transformers.masking_utils.sdpa_mask`.  The mask is (batch or 1, 1, queries, keys):
    boolean, True is kept, or with `is_added` of `dtype`, to be added to scores; None for a causal one of a prompt.
    """
    if attention_mask is not None:  # padding, in a call of somebody else
        sizes = dict(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset)
        others |= dict(kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask)
        return (eager_mask if is_added else sdpa_mask)(**sizes, **others, dtype=dtype, device=device)
    is_prompt = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    if is_prompt and mask_function is causal_mask_function and not is_added:
        return None  # attention is causal by itself
    first = torch.as_tensor(q_offset, device=device).view(-1, 1, 1, 1)
    rows = first + torch.arange(q_length, device=device).view(-1, 1)
    columns = kv_offset + torch.arange(kv_length, device=device)
    batch = torch.arange(len(first), device=device).view(-1, 1, 1, 1)
    mask = mask_function(batch, torch.zeros_like(batch[:1]), rows, columns)
    if is_added:
        mask = torch.where(mask, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min)
    if (seen := _seen.get()) is not None:
        seen.made[id(mask)] = mask, mask_function
    return mask


def mask_functions(model: PreTrainedModel, call: Callable[[], object]) -> dict[str, Callable | None]:
    """The functions of the masks that a model's attentions have in a call, by path; None for unknown ones."""
    seen = Seen()
    token = _seen.set(seen)
    try:
        with at_positions(model):
            call()
    finally:
        _seen.reset(token)
    paths = {module: path for path, module in model.named_modules()}
    known = {id(None): causal_mask_function, **{number: function for number, (_, function) in seen.made.items()}}
    return {paths[module]: known.get(id(mask)) for module, mask in seen.given.items()}


def _sdpa(module, query, key, value, attention_mask, **kwargs):
    _note(module, attention_mask)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _note(module: torch.nn.Module, mask: torch.Tensor | None) -> None:
    if (seen := _seen.get()) is not None:
        seen.given[module] = mask


def _eager(module, query, key, value, attention_mask, **kwargs):
    """The attention that the file of a model writes out."""
    _note(module, attention_mask)
    written = sys.modules[type(module).__module__].eager_attention_forward
    return written(module, query, key, value, attention_mask, **kwargs)


@contextlib.contextmanager
def at_positions(model: PreTrainedModel):
    """A context in which a model, whose attention is by "sdpa" or "eager", takes masks of `mask_at`."""

    def configs() -> list:
        found = {id(x): x for x in (getattr(m, "config", None) for m in model.modules())}
        return [x for x in found.values() if isinstance(x, PreTrainedConfig)]

    with contextlib.ExitStack() as stack:
        for override in OVERRIDES:
            stack.enter_context(override.context(configs))
        yield


AttentionInterface.register(SDPA, _sdpa)
AttentionInterface.register(EAGER, _eager)
AttentionMaskInterface.register(SDPA, mask_at)
AttentionMaskInterface.register(EAGER, functools.partial(mask_at, is_added=True))
