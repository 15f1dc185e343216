"""An attention as the function that chooses its mask sees it."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AttentionSite:
    """One attention of the model.

    `constant` is the model's own constant mask, bool (1 or B, 1 or H, Sq, Skv), or None; `causal` is "", "top-left" or
    "bottom-right"; `sizes` are (B, H, Sq, Skv).  With `first_row` the user's mask is the Sq rows from there on of his
    mask at (Skv, Skv).  An attention with positions has Sq = Skv here, and no masks of its own.  With `heads`, (first,
    all), it has the H heads from the first one on of all those that the user's mask is for.  `reordered` says that its
    tokens stand in the order that the user's mask wants, and not in the model's.
    """

    path: str
    causal: str
    constant: np.ndarray | None
    sizes: tuple[int, int, int, int]
    first_row: int | None = None
    heads: tuple[int, int] | None = None
    reordered: bool = False
