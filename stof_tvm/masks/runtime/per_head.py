"""A rule for each head."""

import reprlib
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from stof_tvm.masks.mask import Mask
from stof_tvm.masks.mask import per_head as mask_per_head
from stof_tvm.masks.runtime.rule import ByItself, Rule
from stof_tvm.masks.windows import causal
from tir_kernels.errors import MaskError


def per_head(rules) -> Rule:
    """One rule or static mask for each head, in order.

    Heads of the same rule are evaluated together, and their static masks stay those of each head.

    Parameters
    ----------
    rules : iterable of Rule or Mask
        One for each query head, at least one Rule among them; all rules have the same block.

    Raises
    ------
    MaskError
        An empty list, an entry that is neither, no Rule, rules of several blocks, masks that depend on the head
        already; when it is used, another number of heads.
    """
    if isinstance(rules, Mask | Rule) or not isinstance(rules, Iterable):
        raise MaskError(f"runtime.per_head needs a list of rules and masks, got {reprlib.repr(rules)}")
    entries = list(rules)
    for h, entry in enumerate(entries):
        if not isinstance(entry, Mask | Rule):
            raise MaskError(f"runtime.per_head entry {h} must be a Rule or a Mask, got {type(entry).__name__}")
    found = [entry for entry in entries if isinstance(entry, Rule)]
    if not found:
        raise MaskError(f"runtime.per_head needs at least one Rule, got {entries!r}: masks.per_head takes masks alone")
    for rule in found:
        if rule.block != found[0].block:
            raise MaskError(
                f"runtime.per_head needs rules of one block: {found[0]!r} has {found[0].block}, {rule!r} {rule.block}"
            )
    text = f"per_head([{', '.join(map(repr, entries))}])"
    heads = OfHeads(entries, found[0].block)
    return Rule(heads, found[0].block, _within(entries), text, identity=ByItself(heads))


def _within(entries: list[Mask | Rule]) -> Mask | None:
    """The static masks of all heads; None where none has one."""
    masks = [entry.within if isinstance(entry, Rule) else entry for entry in entries]
    if all(mask is None for mask in masks):
        return None
    everything = causal() | ~causal()
    return mask_per_head([everything if mask is None else mask for mask in masks])


class OfHeads:
    """The function of a rule for each head: each distinct one is called once, with the heads that it is for.

    Attributes
    ----------
    entries : tuple of Rule or Mask
        Those of the heads, in order.
    """

    def __init__(self, entries: Sequence[Mask | Rule], block: tuple[int, int]):
        self.entries = tuple(entries)
        self.count, self.block = len(entries), block
        self.rules: dict[Hashable, Rule] = {}
        self.heads: dict[Hashable, list[int]] = {}
        for h, entry in enumerate(entries):
            if isinstance(entry, Rule):
                self.rules.setdefault(entry.identity, entry)
                self.heads.setdefault(entry.identity, []).append(h)

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.in_rows(q, k)(0, -(-q.shape[2] // self.block[0]))

    def in_rows(self, q: torch.Tensor, k: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
        """A function of `first` and `end` to these rows of the block map."""
        if q.shape[1] != self.count:
            raise MaskError(f"runtime.per_head has rules for {self.count} heads, q has {q.shape[1]}")
        columns = -(-k.shape[2] // self.block[1])
        of_rules = {x: self.rules[x].maps_of_rows(*_of_heads(q, k, heads)) for x, heads in self.heads.items()}

        def rows(first: int, end: int) -> torch.Tensor:
            everything = torch.ones(1, 1, end - first, columns, dtype=torch.bool, device=q.device)
            maps = [everything] * self.count
            for identity, heads in self.heads.items():
                found = of_rules[identity](first, end)
                for place, h in enumerate(heads):
                    one = place if found.shape[1] > 1 else 0
                    maps[h] = found[:, one : one + 1]
            batch = max(one.shape[0] for one in maps)
            return torch.cat([one.expand(batch, -1, -1, -1) for one in maps], 1)

        return rows


def _of_heads(q: torch.Tensor, k: torch.Tensor, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of some heads, ascending: keys are repeated only where heads of a group are apart."""
    if len(heads) == q.shape[1]:
        return q, k
    group = q.shape[1] // k.shape[1]
    shared = [h // group for h in heads]
    if all(shared.count(one) == group for one in shared):
        shared = sorted(set(shared))
    return _slices(q, heads), _slices(k, shared)


def _slices(x: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """x (B, H, S, D) with these heads only, by slices: indices would be copied to the device."""
    return torch.cat([x[:, h : h + 1] for h in heads], 1)
