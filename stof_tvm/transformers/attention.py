"""The attention function "stof" of transformers: `sparse_attention`, or PyTorch's attention and a warning why."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers.utils.import_utils import is_cuda_stream_capturing

from stof_tvm import masks
from stof_tvm.attention import sparse_attention
from stof_tvm.masks.mask import Mask
from stof_tvm.transformers.dense import dense_attention
from stof_tvm.transformers.model_mask import ModelMask, is_traced
from stof_tvm.transformers.set_mask import GivenToSite, mask_given_to
from stof_tvm.verification.backends import by_pytorch
from tir_kernels.errors import MaskError, StofError, UnsupportedError, VerificationError

SHORT = 64  # fewer queries than this, and fewer than keys, are a step of decoding
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DENSELY = (
    "runs on PyTorch's scaled_dot_product_attention, densely, as attn_implementation='sdpa' would, instead of a sparse "
    "kernel: {reason}"
)
NO_WEIGHTS = (
    "returns no weights for output_attentions=True, as attn_implementation='sdpa' does not: sparse kernels do not have "
    "them. Call model.set_attn_implementation('eager') where weights are needed"
)


def stof_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: softmax(scaling * query keyᵀ + position_bias) value over what the mask keeps.

    Parameters
    ----------
    query : (B, H, Sq, D), key : (B, Hkv, Skv, D), value : (B, Hkv, Skv, Dv)
        float32, float16 or bfloat16.
    attention_mask : tensor, optional
        A `ModelMask`, a boolean tensor (True is kept) or scores that are added; broadcasts to (B, H, Sq, Skv).  Without
        one, `is_causal` or else `module.is_causal` says whether a query sees the keys before it only.
    position_bias : tensor, optional
        Floating point, broadcasts to (B, H, Sq, Skv), added to the scores.
    softcap, s_aux :
        As `softcap` and `sink` of `sparse_attention`; s_aux has H elements.

    Returns
    -------
    (B, Sq, H, Dv) in the query's dtype, and None for the weights.

    Weights that are asked for (output_attentions) are told to be missing by a warning, as transformers' "sdpa" logs it.

    In a traced graph, and for a step of decoding (fewer than `SHORT` queries, and fewer than keys), PyTorch computes
    the attention.  It also does, with a warning that says why, where gradients are recorded, for dropout, and where no
    kernel supports the call.  Raises MaskError if a mask of `set_mask` cannot be applied, and UnsupportedError for
    sinks of another form.
    """
    call = Call(module, query, key, value, attention_mask, scaling, is_causal, position_bias, softcap, s_aux)
    if kwargs.get("sinks") is not None:
        raise UnsupportedError(f"{call.name} passes sinks to its attention: use attn_implementation='eager'")
    given = mask_given_to(module)
    if is_traced(query) or by_pytorch.get():  # also what an engine is compared with
        if given is not None:
            raise MaskError(
                f"{call.name} has a mask of set_mask, which a traced graph would lose: call set_mask(model, None), and "
                "give the mask to stof_tvm.build, or to torch.compile in options={'mask': mask}"
            )
        return _densely(call, None, dropout, kwargs), None
    if kwargs.get("output_attentions"):
        _warn(call, "weights", NO_WEIGHTS)
    reason = _why_dense(call, dropout, kwargs)
    if reason is None and not call.is_step:
        try:
            return _sparsely(call, given), None
        except VerificationError:
            raise
        except MaskError as error:
            if "keeps nothing" not in str(error):
                raise
            # Every row is 0, which needs no kernel: a prompt's first part may be padding alone.
        except StofError as error:
            reason = str(error)
    if reason is not None:
        _warn(call, reason, DENSELY.format(reason=reason))
    return _densely(call, given, dropout, kwargs), None


@dataclass(frozen=True)
class Call:
    """A call of an attention, with the names of its arguments in `stof_attention`."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float | None
    is_causal: bool | None
    bias: torch.Tensor | None
    softcap: float | None
    sink: torch.Tensor | None

    @property
    def name(self) -> str:
        """The attention's class."""
        return type(self.module).__name__

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, H, Sq, Skv)."""
        batch = max(self.query.shape[0], self.key.shape[0])
        return batch, self.query.shape[1], self.query.shape[2], self.key.shape[2]

    @property
    def is_step(self) -> bool:
        """Whether it is a step of decoding: such steps have ever more keys, and a kernel is compiled for one number."""
        return self.query.shape[2] < min(SHORT, self.key.shape[2])

    @property
    def is_causal_by_itself(self) -> bool:
        """Whether there is no mask, but one is meant."""
        is_causal = getattr(self.module, "is_causal", True) if self.is_causal is None else self.is_causal
        return self.mask is None and self.query.shape[2] > 1 and bool(is_causal)

    @property
    def fits(self) -> bool:
        """Whether the mask is still blocks, for just the keys of this call."""
        return isinstance(self.mask, ModelMask) and self.mask.shape[-1] == self.key.shape[2]

    @property
    def mask_tensor(self) -> torch.Tensor | None:
        """The mask as a tensor of the call's keys; models leave it to the attention to cut off what is beyond."""
        mask = self.mask.dense() if isinstance(self.mask, ModelMask) else self.mask
        kv_len = self.key.shape[2]
        return mask if mask is None or mask.shape[-1] <= kv_len else mask[..., :kv_len]


def _why_dense(call: Call, dropout: float, kwargs: dict) -> str | None:
    """Why a call cannot run on a sparse kernel; None if it can, as far as is known before it is tried."""
    tensors = [x for x in (call.query, call.key, call.value, call.bias, call.sink) if x is not None]
    if kwargs.get("cache") is not None:
        return "its keys and values are in a paged cache"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "gradients are recorded (call the model under torch.no_grad())"
    if dropout > 0:
        return f"it drops weights with probability {dropout} (call model.eval())"
    if call.query.dtype not in DTYPES:
        return f"its dtype is {call.query.dtype}"
    if is_cuda_stream_capturing():
        return "a CUDA graph is captured, in which masks cannot be read"
    return None


def _sparsely(call: Call, given: GivenToSite | None) -> torch.Tensor:
    mask, bias = _kept(call), call.bias
    if mask is None and (scores := call.mask_tensor) is not None:
        bias = scores if bias is None else bias + scores
    if given is not None:
        own = given.at(call.sizes, *_positions(call, given))
        mask = own if mask is None else own & mask
    query, batch = call.query, call.sizes[0]
    out = sparse_attention(
        query.expand(batch, -1, -1, -1),
        call.key,
        call.value,
        mask,
        scale=call.scaling,
        bias=bias,
        enable_gqa=True,
        sink=None if call.sink is None else call.sink.reshape(-1),
        softcap=call.softcap,
    )
    return out.transpose(1, 2).contiguous()


def _kept(call: Call) -> "Mask | torch.Tensor | None":
    """The model's own mask; None if there is none, or scores stand for it."""
    if call.fits:
        return call.mask.blocks  # type: ignore[union-attr]  # `fits` is True of a ModelMask only
    if call.mask is not None:
        tensor = call.mask_tensor
        return tensor if tensor is not None and tensor.dtype == torch.bool else None
    return masks.causal() if call.is_causal_by_itself else None


def _positions(call: Call, given: GivenToSite) -> tuple[int, int]:
    """Where in the sequence the first query and the first key of a call are."""
    mask, (_, _, q_len, kv_len) = call.mask, call.sizes
    if isinstance(mask, ModelMask) and mask.knows_positions:
        return mask.q_offset, mask.kv_offset
    if q_len == kv_len:
        return 0, 0
    raise MaskError(
        f"{call.name} compares {q_len} queries with {kv_len} keys, whose positions are not known: the mask that "
        f"set_mask gave to {given.pattern!r} cannot be applied (leave cross attentions out of its paths)"
    )


def _densely(call: Call, given: GivenToSite | None, dropout: float, kwargs: dict[str, Any]) -> torch.Tensor:
    """The call by PyTorch, as transformers' "sdpa" computes it."""
    mask = call.mask
    if given is not None:
        if kwargs.get("cache") is not None:
            raise MaskError(f"{call.name}: a mask of set_mask cannot be applied to keys of a paged cache")
        own = given.at(call.sizes, *_positions(call, given)).dense(*call.sizes[2:]).to(call.query.device)
        mask = _both(own[(None,) * (4 - own.dim())], call)
    elif call.fits:
        mask = mask.for_sdpa()  # type: ignore[union-attr]  # `fits` is True of a ModelMask only
    else:
        mask = call.mask_tensor
    return dense_attention(replace(call, mask=mask), dropout, kwargs)


def _both(own: torch.Tensor, call: Call) -> torch.Tensor:
    """A boolean mask and the call's own mask as one tensor, of scores if the own mask has scores."""
    if call.is_causal_by_itself:
        return own & torch.ones(own.shape[-2:], dtype=torch.bool, device=own.device).tril()
    tensor = call.mask_tensor
    if tensor is None:
        return own
    return own & tensor if tensor.dtype == torch.bool else tensor.masked_fill(~own, torch.finfo(tensor.dtype).min)


_warned = WeakIdKeyDictionary()  # configuration of a model -> {(class of attention, reason)}


def _warn(call: Call, reason: str, what: str) -> None:
    """Warn of `what` an attention does, once for each class of attention, reason and model."""
    model = getattr(call.module, "config", call.module)
    known = _warned.setdefault(model, set())
    if (call.name, reason) in known:
        return
    known.add((call.name, reason))
    warnings.warn(f"attention {call.name} {what}", stacklevel=3)
