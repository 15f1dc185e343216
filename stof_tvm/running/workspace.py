"""Memory that programs on a GPU have in common, whose calls follow one another."""

from collections.abc import Sequence

import torch

BLOCK_ALIGNMENT = 256  # cudaMalloc's


def block_bytes(block_sizes: Sequence[int]) -> list[int]:
    """The bytes that each memory block of a program takes, its alignment included."""
    return [-(-size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT for size in block_sizes]


class Workspace:
    """Bytes for the largest of some programs; none of them expects anything in it that another call left.

    The programs' calls must run one after another, on the GPU as well.
    """

    def __init__(self) -> None:
        self._most = 0
        self._memory: torch.Tensor | None = None

    def reserve(self, block_sizes: Sequence[int]) -> None:
        """Have room for a program with these blocks (bytes)."""
        self._most = max(self._most, sum(block_bytes(block_sizes)))

    def memory(self, block_sizes: Sequence[int], device: torch.device) -> torch.Tensor:
        """A program's memory (uint8, one dimension); of its own if it was not reserved before the first was used."""
        needed = sum(block_bytes(block_sizes))
        if self._memory is None:
            with torch.inference_mode(False):
                self._memory = torch.empty(max(self._most, needed), dtype=torch.uint8, device=device)
        if needed > self._memory.numel() or self._memory.device != device:
            return torch.empty(needed, dtype=torch.uint8, device=device)
        return self._memory[:needed]
