"""What a kind of problem offers: its definitions, by which logs name it, searches check it and workloads key it.

A kind is a module.  Templates (tir_kernels/template.py) compute its problems; a matcher of relax_passes finds them in
models.
"""

from typing import TYPE_CHECKING, Any, Protocol

from tvm import te

from tir_kernels.template import Spec

if TYPE_CHECKING:  # searches have it loaded; what only compiles or runs kernels has no need of it
    import torch


class Problem(Protocol):
    """A problem of fused segments: a frozen dataclass of shapes, dtypes and constants."""

    @property
    def dtype(self) -> str: ...

    @property
    def inputs(self) -> list[Spec]:
        """Shape and dtype of every input, in order."""
        ...

    @property
    def outputs(self) -> list[Spec]:
        """Shape and dtype of every output, in order."""
        ...


class ProblemKind(Protocol):
    """A kind of problem.

    Attributes
    ----------
    PROBLEM : type
        The frozen dataclass of its problems; its name is in tuning logs.
    PARTS : tuple of type
        Dataclasses and named tuples that its fields hold, besides other kinds' problems.
    """

    @property
    def PROBLEM(self) -> type: ...

    @property
    def PARTS(self) -> tuple[type, ...]: ...

    def tensors(self, problem: Any) -> list[te.Tensor]:
        """Inputs and outputs as tensor expressions, in the problem's order of arguments; never run.

        The first output's block is called "out".
        """
        ...

    def draw(self, problem: Any, generator: "torch.Generator", device: "torch.device") -> "list[torch.Tensor]":
        """Random inputs on a device, in order, for which outputs are about one."""
        ...

    def reference(self, problem: Any, inputs: "list[torch.Tensor]", keep: Any = None) -> "list[torch.Tensor]":
        """The outputs in PyTorch, unfused, in the inputs' own dtype: what results are compared with.

        `keep` is an attention's mask, bool, and broadcasts to (batch, heads, q_len, kv_len); a fused segment has none.
        """
        ...
