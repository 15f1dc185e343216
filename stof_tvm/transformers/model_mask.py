"""The mask of one call of a model: blocks for the sparse kernels, a tensor for whoever reads its elements."""

import functools
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_cuda_stream_capturing, is_tracing

from stof_tvm.masks.arguments import FixedArray, as_numpy
from stof_tvm.masks.flex import taken_directly
from stof_tvm.masks.mask import Grid, Leaf, Mask
from stof_tvm.masks.pattern import Columns
from tir_kernels.errors import MaskError


def stof_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """transformers' mask interface: a `ModelMask`, or None where all pairs of a call are kept.

    Arguments are those of `transformers.masking_utils.sdpa_mask`, whose result this is in a graph that is being traced.
    """
    if isinstance(attention_mask, ModelMask):  # made before: by `generate`, for a cache of fixed length
        return attention_mask
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    arguments = {**sizes, "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function, **kwargs}
    if is_traced(attention_mask) or is_cuda_stream_capturing():
        return sdpa_mask(**arguments, attention_mask=attention_mask)
    arguments["q_offset"] = int(q_offset)  # of a static cache it is a tensor
    if attention_mask is not None:
        attention_mask = attention_mask.clone()  # the caller may write to its tensor before this mask is read
    return None if _keeps_all(arguments, attention_mask) else ModelMask(arguments, attention_mask)


def _keeps_all(arguments: dict[str, Any], padding: torch.Tensor | None) -> bool:
    """Whether a mask of both directions keeps all pairs, by what `sdpa_mask` asks before it leaves a mask out."""
    kv_length, window = arguments["kv_length"], arguments.get("local_size")
    if not arguments.get("allow_is_bidirectional_skip") or (window is not None and kv_length >= window):
        return False
    covers_keys = padding is None or padding.shape[-1] >= kv_length + arguments.get("kv_offset", 0)
    return covers_keys and (padding is None or bool(padding.all()))


def is_traced(x: torch.Tensor | None) -> bool:
    """Whether a graph is made of what happens to a tensor, by TorchDynamo, torch.export, torch.fx or torch.jit."""
    return torch.compiler.is_compiling() or (is_tracing(x) and not is_cuda_stream_capturing())


class ModelMask(torch.Tensor):
    """A mask as boolean (B, 1, Sq, Skv), True is kept, whose elements are computed when an operator reads them.

    Models slice, join and move masks, as they do tensors; the result is then such a tensor.  An attention that gets the
    mask as it was made takes its `blocks`.

    Attributes
    ----------
    q_offset, kv_offset : int
        Position of the first query and of the first key in the sequence.
    knows_positions : bool
        Whether the offsets are those of the sequence; of a cross attention's queries they may not be.
    """

    @staticmethod
    def __new__(cls, arguments: dict[str, Any], padding: torch.Tensor | None):
        """`arguments` are those of `sdpa_mask`, but for `attention_mask`, which is `padding`."""
        shape = arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"]
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=arguments.get("device", "cpu"))

    def __init__(self, arguments: dict[str, Any], padding: torch.Tensor | None):
        self._arguments, self._padding = arguments, padding
        self._tensors: dict[bool, torch.Tensor | None] = {}
        self._blocks: Mask | None = None
        self.q_offset, self.kv_offset = arguments["q_offset"], arguments["kv_offset"]
        # Only functions that make masks of both directions pass this argument, and only they serve cross attentions.
        is_causal = "allow_is_bidirectional_skip" not in arguments
        self.knows_positions = is_causal or arguments["q_length"] == arguments["kv_length"]

    @property
    def blocks(self) -> Mask:
        """The mask for the sparse kernels; it depends on no head, and on the batch entry where that matters."""
        if self._blocks is None:
            self._blocks = _Read(self._made())
        return self._blocks

    def _made(self) -> Mask:
        arguments, padding = self._arguments, self._padding
        if padding is not None and padding.dim() != 2:
            raise MaskError(f"a padding mask has two dimensions, (batch, keys), got shape {tuple(padding.shape)}")
        function = functools.partial(_in_the_sequence, arguments["mask_function"], self.q_offset, self.kv_offset)
        mask = taken_directly(function, arguments["batch_size"], 1)
        if padding is None:
            return mask
        kept = as_numpy("attention_mask", padding)[:, self.kv_offset : self.kv_offset + arguments["kv_length"]]
        kept = np.pad(kept.astype(np.bool_), ((0, 0), (0, arguments["kv_length"] - kept.shape[1])))
        return mask if kept.all() else mask & key_padding(kept)

    def dense(self) -> torch.Tensor:
        """The mask as a boolean tensor (B, 1, Sq, Skv)."""
        found = self.for_sdpa()
        if found is None:
            found = self._tensor(False)
        assert found is not None  # nothing may be skipped
        return found

    def for_sdpa(self) -> torch.Tensor | None:
        """What `sdpa_mask` makes: boolean (B, 1, Sq, Skv), or None where PyTorch's `is_causal`, or no mask, will do."""
        return self._tensor(True)

    def _tensor(self, may_skip: bool) -> torch.Tensor | None:
        if may_skip not in self._tensors:
            never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            arguments = self._arguments if may_skip else {**self._arguments, **never}
            self._tensors[may_skip] = sdpa_mask(**arguments, attention_mask=self._padding)
        return self._tensors[may_skip]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # PyTorch's own hint

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]  # has no hints
        args, kwargs = pytree.tree_map_only(ModelMask, ModelMask.dense, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents=None):
        return f"ModelMask({', '.join(f'{name}={value}' for name, value in self._arguments.items())})"


def key_padding(kept: np.ndarray) -> Mask:
    """Keeps the keys that are True in `kept`, boolean (batch, keys)."""
    rows = [FixedArray(row) for row in kept]
    return Grid([[_of_keys(row)] for row in rows], f"key_padding(<bool {'×'.join(map(str, kept.shape))}>)")


def _of_keys(kept: FixedArray) -> Mask:
    def bind(q_len, kv_len):
        if kept.array.shape != (kv_len,):
            raise MaskError(f"padding of {kept.array.shape[0]} keys does not fit kv_len={kv_len}")
        return Columns(kept.array)

    return Leaf(key_padding, {"kept": kept.key}, bind)


def _in_the_sequence(mask_function, q_offset, kv_offset, b, h, q_idx, kv_idx):
    return mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)


class _Read(Mask):
    """A mask whose identity is taken once, for all layers of a call; MaskError if it changed when it is evaluated."""

    def __init__(self, mask: Mask):
        self.mask, self.batch, self.heads = mask, mask.batch, mask.heads
        self._identity = mask.identity

    def at(self, b, h):
        if self.mask.identity != self._identity:
            raise MaskError("a tensor that a model's mask reads was written to before the mask was used")
        return self.mask.at(b, h)

    def bind(self, q_len, kv_len):
        return self.at(0, 0).bind(q_len, kv_len)

    @property
    def _parts(self):
        return self.mask._parts

    def __repr__(self):
        return repr(self.mask)
