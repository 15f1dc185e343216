"""An attention as the function that chooses its mask sees it."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AttentionSite:
    """One attention of the model.

    `constant` is the model's own constant mask, bool (1 or B, 1 or H, Sq, Skv), or None; `causal` is "", "top-left" or
    "bottom-right"; `sizes` are (B, H, Sq, Skv).
    """

    path: str
    causal: str
    constant: np.ndarray | None
    sizes: tuple[int, int, int, int]
