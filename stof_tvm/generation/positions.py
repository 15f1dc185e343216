"""Attention and masks of transformers for new tokens that stand at their own position in each sequence.

transformers makes masks for one position of all sequences, and applies a causal mask as a tensor while a model is
exported.  `at_positions` lets a model take the masks of `mask_at` instead, which are made of the same functions.
"""

import contextlib
import functools
import sys

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from stof_tvm.frontend.exportable.transformers_configs import Override

SDPA, EAGER = "stof_positions", "stof_added_positions"  # names of implementations
ATTRIBUTE = "_attn_implementation_internal"
OVERRIDES = Override(ATTRIBUTE, ("sdpa",), SDPA), Override(ATTRIBUTE, ("eager", None), EAGER)


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
    **_,
) -> torch.Tensor | None:
    """transformers' mask interface, where `q_offset` is 0 or the position of each sequence: int64 (batch,) or (1,).

    Other arguments are those of `transformers.masking_utils.sdpa_mask`.  The mask is (batch or 1, 1, queries, keys):
    boolean, True is kept, or with `is_added` of `dtype`, to be added to scores; None for a causal one of a prompt.
    """
    is_prompt = not isinstance(q_offset, torch.Tensor)
    if is_prompt and mask_function is causal_mask_function and not is_added:
        return None  # attention is causal by itself
    first = torch.as_tensor(q_offset, device=device).view(-1, 1, 1, 1)
    rows = first + torch.arange(q_length, device=device).view(-1, 1)
    columns = kv_offset + torch.arange(kv_length, device=device)
    batch = torch.arange(len(first), device=device).view(-1, 1, 1, 1)
    kept = mask_function(batch, torch.zeros_like(batch[:1]), rows, columns)
    if not is_added:
        return kept
    return torch.where(kept, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min)


def _eager(module, *args, **kwargs):
    """The attention that the file of a model writes out."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


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


AttentionInterface.register(SDPA, sdpa_attention_forward)
AttentionInterface.register(EAGER, _eager)
AttentionMaskInterface.register(SDPA, mask_at)
AttentionMaskInterface.register(EAGER, functools.partial(mask_at, is_added=True))
