"""The weights of one attention, some rows at a time, and the rows of masks beside them: no q_len × kv_len array."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from stof_tvm.masks.compilation import check_lengths
from stof_tvm.masks.mask import Mask
from tir_kernels.errors import InputError, MaskError

CHUNK_ELEMENTS = 1 << 23  # scores held at a time


@dataclass(frozen=True, eq=False)
class Attention:
    """The operands of one attention.

    Attributes
    ----------
    q, k, v : Tensor
        Floating point, (B, H, Sq, D), (B, Hkv, Skv, D) and (B, Hkv, Skv, Dv); `v` may be None.
    scale : float
        What scores are multiplied by.
    causal : bool
        Whether only keys j <= i are kept.
    bias : Tensor, optional
        Broadcastable to (B, H, Sq, Skv): boolean, True is kept, or floating point, added to the scores.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    scale: float
    causal: bool = False
    bias: torch.Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, H, Sq, Skv)."""
        return *self.q.shape[:3], self.k.shape[2]

    def chunks(
        self, rows: int | None = None, within: "MaskRows | None" = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (i, scores, whole): int64 (n,) query rows, float32 (B, H, n, Skv), and boolean likewise.

        `whole` is what the attention itself keeps, and `within` too, and may be broadcastable only.  With `rows`, that
        many evenly spaced query rows are looked at instead of all.
        """
        batch, heads, q_len, kv_len = self.sizes
        chosen = torch.arange(q_len) if rows is None or rows >= q_len else torch.arange(rows) * q_len // rows
        k = self.k.float().transpose(-1, -2)
        j = torch.arange(kv_len, device=k.device)
        for i in chosen.split(max(1, CHUNK_ELEMENTS // (batch * heads * kv_len))):
            i = i.to(k.device)
            scores = grouped_product(self.q[:, :, i].float(), k) * self.scale
            whole = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=k.device)
            if self.causal:
                whole = (j <= i[:, None])[None, None]
            if within is not None:
                whole = whole & within(i)
            if self.bias is not None:
                part = self._bias_rows(i)
                if part.dtype == torch.bool:
                    whole = whole & part
                else:
                    # Fills such as the smallest number of a dtype are masks, too.
                    whole = whole & (part > torch.finfo(part.dtype).min / 2)
                    scores = scores + part
            yield i, scores, whole

    def _bias_rows(self, i: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        bias = self.bias.reshape((1,) * (4 - self.bias.ndim) + self.bias.shape)
        return bias if bias.shape[2] == 1 else bias[:, :, i]

    @property
    def is_causal(self) -> bool:
        """Whether it keeps no key after the query."""
        if self.causal:
            return True
        if self.bias is None or self.sizes[2] != self.sizes[3]:
            return False
        j = torch.arange(self.sizes[3], device=self.q.device)
        for i in torch.arange(self.sizes[2], device=self.q.device).split(1024):
            part = self._bias_rows(i)
            part = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
            if (part & (j > i[:, None])).any():
                return False
        return True


def grouped_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x @ y in float32 for x (B, H, n, m) and y (B, Hkv, m, p), H being a multiple of Hkv: nothing of y is repeated.

    Both are floating point, of one dtype; what is shorter than float32 is multiplied without rounding.
    """
    batch, heads, rows, _ = x.shape
    x = x.reshape(batch, y.shape[1], -1, x.shape[3])
    if x.dtype in (torch.float16, torch.bfloat16) and is_on_gpu(x):
        product = torch.bmm(x.flatten(0, 1), y.flatten(0, 1), out_dtype=torch.float32)
    else:
        with without_autocast(x.device):
            product = x.float() @ y.float()
    return product.reshape(batch, heads, rows, y.shape[3])


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which a device's products have the dtypes of their operands, if they might have others."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def is_on_gpu(x: torch.Tensor) -> bool:
    """Whether it is a GPU's tensor itself: none that stands for it while a graph is traced, and no operator watched."""
    return x.is_cuda and type(x) is torch.Tensor and not is_in_torch_dispatch_mode(False)


def softmax_of(scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Float32 (B, H, n, Skv): the weights of what is kept, boolean and broadcastable; 0 in a row that keeps nothing."""
    weights = scores.masked_fill(~kept, -torch.inf).softmax(-1)
    return torch.where(kept.any(-1, keepdim=True), weights, 0.0)


class MaskRows:
    """The rows of a mask at the sizes of an attention, (B, H, Sq, Skv).

    MaskError where the mask does not fit the sizes.
    """

    def __init__(self, mask: Mask, sizes: tuple[int, int, int, int], device: torch.device):
        batch, heads, self.q_len, self.kv_len = *sizes[:2], *check_lengths(*sizes[2:])
        if mask.batch not in (None, batch) or mask.heads not in (None, heads):
            raise MaskError(
                f"the mask has (batch, heads) = {(mask.batch or 1, mask.heads or 1)}, which does not broadcast to "
                f"{(batch, heads)}"
            )
        self.shape, self.device = (mask.batch or 1, mask.heads or 1), device
        entries = [mask.at(*at) for at in np.ndindex(self.shape)]
        self.numbers = [entry.identity for entry in entries]
        self.patterns = {entry.identity: entry.bind(self.q_len, self.kv_len) for entry in entries}

    def __call__(self, i: torch.Tensor) -> torch.Tensor:
        """Boolean (batch or 1, heads or 1, n, Skv): rows i, int64 (n,) ascending."""
        rows, columns = i.cpu().numpy()[None], np.arange(self.kv_len)[None]
        shape = len(i), self.kv_len
        kept = {key: np.broadcast_to(pattern.keep(rows, columns)[0], shape) for key, pattern in self.patterns.items()}
        dense = np.stack([kept[key] for key in self.numbers]).reshape(*self.shape, *shape)
        return torch.from_numpy(dense).to(self.device)


def check_attention(q, k, v=None) -> None:
    """InputError unless q, k and v are floating-point tensors of 4 dimensions that belong together."""
    tensors = {"q": q, "k": k} | ({} if v is None else {"v": v})
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.ndim != 4 or not x.numel():
            shape = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise InputError(
                f"{name} must be a floating-point tensor of shape (batch, heads, length, size), got {shape}"
            )
    heads, kv_heads = q.shape[1], k.shape[1]
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or heads % kv_heads:
        raise InputError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must have one batch and head size, and q a multiple of k's "
            "heads"
        )
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise InputError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must have the same batch, heads and length")


def default_scale(q: torch.Tensor) -> float:
    """1 / √D, of q (B, H, Sq, D), floating point."""
    return 1.0 / math.sqrt(q.shape[-1])
