"""What rules, which take the scale of scores for 1 / √D, are given for another scale."""

import math

SAME_SCALE = 1e-6  # a relative difference of scales that no rounding of q would show
LEAST_OF_HALF = 2**-6  # a smaller factor makes many numbers of float16 subnormal


def rule_scale(scale: float, head_dim: int, dtype: str) -> tuple[float, str]:
    """(the factor of q, the dtype of q and k) for a rule; a factor of 1 is left out.

    `dtype` is that of the attention.  float16 becomes float32 where the factor might make q infinite or zero.
    """
    factor = scale * math.sqrt(head_dim)
    if abs(factor - 1) <= SAME_SCALE:
        return 1.0, dtype
    is_safe = dtype != "float16" or LEAST_OF_HALF <= abs(factor) <= 1
    return factor, dtype if is_safe else "float32"
