"""The values in a formula that depend on an index: on one, or on both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

ROW, COLUMN, OFFSET = "q_idx", "kv_idx", "kv_idx - q_idx"


@dataclass(frozen=True, eq=False)
class Vector:
    """A value that depends on one index, for all its values.

    Attributes
    ----------
    axis : str
        ROW, COLUMN or OFFSET.
    values : Tensor
        (q_len,), (kv_len,), or (q_len + kv_len - 1,) from the offset 1 - q_len on.
    shift : int, optional
        The value is the index plus this number; None where it is not.
    """

    axis: str
    values: torch.Tensor
    shift: int | None = None


@dataclass(frozen=True, eq=False)
class Mixed:
    """A value that depends on both indices: an operator's, of arguments that are Vectors, Mixed or constants."""

    function: Any  # an overload of an operator
    args: tuple
    kwargs: dict
    dtype: torch.dtype

    def compute(self, operand: Callable[[Any], Any]):
        """The operator applied to what `operand` makes of each argument."""
        return self.function(*fx.node.map_aggregate(self.args, operand), **self.kwargs)
