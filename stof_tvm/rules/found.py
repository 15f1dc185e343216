"""What the rules of an engine found in its last call: results of its program beside those of the model."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tir_kernels.report_rows import RewrittenRow

THE_MODEL = "(the model)"  # what reports call the attention of the model itself


class FoundBlocks(NamedTuple):
    """What the rule of an attention kept in a call.

    Attributes
    ----------
    density : float
        Kept pairs over all pairs, averaged over batch entries and heads: of the blocks what the static mask keeps.
    block_map : Tensor or None
        Bool (B or 1, H or 1, query blocks, key blocks): the blocks that the rule's function selected.  None where the
        map has more than 2²⁴ elements.
    """

    density: float
    block_map: torch.Tensor | None


def results_of_rules(sites: Sequence[RewrittenRow]) -> int:
    """How many results a program has for the rules of its attentions, after all others."""
    return sum(1 + site.returns_map for site in sites if site.rule is not None)


def described(found: dict[str, FoundBlocks]) -> str:
    """The densities for a report; "" for no attention with a rule."""
    return ", ".join(f"{site or THE_MODEL} {blocks.density:.1%}" for site, blocks in found.items())


def found_blocks(sites: Sequence[RewrittenRow], results: Sequence[torch.Tensor]) -> dict[str, FoundBlocks]:
    """What rules found, by the attention's path; `results` are a call's for them, in order."""
    remaining, found = iter(results), {}
    for site in sites:
        if site.block_map is None:
            continue
        density = float(next(remaining))
        found[site.site] = FoundBlocks(density, next(remaining).clone() if site.returns_map else None)
    return found
