"""Lists that a plan computes on the device, for `sparse_attention`; engines have its steps in their graph."""

import torch

from tir_kernels.attention.compiled import compile_step
from tir_kernels.attention.template import Plan


class PlannedLists:
    """The operands that a plan computes from a block map, a bool tensor, on its device.

    A call allocates its results, so that calls on other streams do not share them, and does not synchronize.
    """

    def __init__(self, plan: Plan, target, device: torch.device):
        self.constants = {name: torch.tensor(array, device=device) for name, array in plan.constants.items()}
        self.steps = [(compile_step(step.function, target), step) for step in plan.steps.values()]
        self.operands = plan.operands

    @property
    def nbytes(self) -> int:
        """Bytes that are held between calls."""
        return sum(x.nbytes for x in self.constants.values())

    def __call__(self, block_map: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The kernel's operands in place of the block map, in order."""
        known = {**self.constants, "block_map": block_map}
        for function, step in self.steps:
            for name, (shape, dtype) in step.outputs.items():
                known[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=block_map.device)
            function(*(known[name] for name in (*step.inputs, *step.outputs)))
        return tuple(known[name] for name in self.operands)
