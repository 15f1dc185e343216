"""Errors of a system's output, and of PyTorch in half precision, against float32 on a sample of heads and rows."""

from collections.abc import Callable

import torch

HEADS = 8
ROWS = 128


class Reference:
    """The exact output of one case, sampled: at most HEADS (batch, head) pairs and ROWS rows, the outermost among them.

    `keep` takes the indices of rows and returns what they keep, boolean (rows, Skv), or (pairs, rows, Skv) for the
    pairs of `places`.  `half_error` is the largest error of softmax(q kᵀ scale) v computed in the inputs' own
    precision, at least one rounding of the output.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: Callable, seed: int = 0):
        heads, dim = q.shape[1], q.shape[3]
        self.rows, self.b, self.h = self.places(q, seed)
        kv = self.b, self.h // (heads // k.shape[1])
        operands = self._sample(q), k[kv], v[kv], keep(self.rows)
        self.expected = self._attention(*operands, dim**-0.5, torch.float32)
        half = self._attention(*operands, dim**-0.5, q.dtype)
        rounding = torch.finfo(q.dtype).eps / 2 * float(self.expected.abs().max())
        self.half_error = max(float((half.float() - self.expected).abs().max()), rounding)

    @staticmethod
    def places(q: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sampled rows, and the batch entry and head of each sampled pair, for q (B, H, Sq, D)."""
        batch, heads, q_len, _ = q.shape
        generator = torch.Generator().manual_seed(seed)
        pairs = torch.randperm(batch * heads, generator=generator)[:HEADS]
        inner = 1 + torch.randperm(max(q_len - 2, 0), generator=generator)[: ROWS - 2]
        rows = torch.cat([inner, torch.tensor([0, q_len - 1])]).unique()
        return rows.to(q.device), (pairs // heads).to(q.device), (pairs % heads).to(q.device)

    def error(self, out: torch.Tensor) -> float:
        """Largest error of an output (B, H, Sq, D) over the sample; NaN where any of its elements is not finite."""
        if not bool(out.isfinite().all()):
            return float("nan")
        return float((self._sample(out).float() - self.expected).abs().max())

    def _sample(self, x):
        return x[self.b, self.h][:, self.rows]

    @staticmethod
    def _attention(q, k, v, keep, scale, dtype):
        scores = (q.to(dtype) @ k.to(dtype).mT * scale).masked_fill(~keep, float("-inf"))
        weights = torch.where(keep.any(-1, keepdim=True), torch.softmax(scores, dim=-1), 0)
        return weights.to(dtype) @ v.to(dtype)
