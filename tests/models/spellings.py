"""Attention modules on q, k, v of shape (batch, heads, length, dim), spelled with SDPA and by hand."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Sdpa(nn.Module):
    """F.scaled_dot_product_attention with fixed options; a mask may be a fourth input or a buffer."""

    def __init__(self, mask=None, **options):
        super().__init__()
        self.options = options
        self.register_buffer("mask", mask)

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask if mask is None else mask, **self.options)


class ByHand(nn.Module):
    """softmax(q kᵀ · scale + mask) v in one of several hands: "add", "masked_fill", "where", "einsum", "baddbmm"."""

    def __init__(self, hand, mask):
        super().__init__()
        self.hand = hand
        self.register_buffer("mask", mask)

    def forward(self, q, k, v):
        return getattr(self, self.hand)(q, k, v, 1 / math.sqrt(q.shape[-1]))

    def add(self, q, k, v, scale):
        bias = torch.zeros_like(self.mask, dtype=q.dtype).masked_fill(~self.mask, float("-inf"))
        return ((q @ k.transpose(-2, -1)) * scale + bias).softmax(-1) @ v

    def masked_fill(self, q, k, v, scale):
        scores = torch.matmul(q, k.transpose(-2, -1)) * scale
        return torch.matmul(F.softmax(scores.masked_fill(~self.mask, float("-inf")), dim=-1), v)

    def where(self, q, k, v, scale):
        scores = torch.matmul(q * scale, k.transpose(-2, -1))
        scores = torch.where(self.mask, scores, torch.finfo(scores.dtype).min)
        return torch.matmul(scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype), v)

    def einsum(self, q, k, v, scale):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
        return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(~self.mask, -1e9).softmax(-1), v)

    def baddbmm(self, q, k, v, scale):
        shape = q.shape
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        bias = torch.zeros_like(self.mask, dtype=q.dtype).masked_fill(~self.mask, float("-inf"))
        scores = torch.baddbmm(bias.expand(q.shape[0], -1, -1), q, k.transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1), v).view(shape)
