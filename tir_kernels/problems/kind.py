"""What a kind of problem defines: how its problems are named, keyed in tuning logs, and checked against PyTorch.

A kind is a module.  Templates (tir_kernels/template.py) compute its problems, and a matcher in relax_passes finds them
in models.  Searches compare results with PyTorch.  They pass the module `torch` in, because this package does not
import it.
"""

from typing import Any, Protocol

from tvm import te

from tir_kernels.template import Spec


def titled(kind: str, sizes: dict[str, int], *details: str) -> str:
    """The usual title: the kind, the sizes, and further details."""
    return " ".join([kind, "x".join(map(str, sizes.values())), *details])


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


class Random(Protocol):
    """Draws tensors of PyTorch; dtypes are names."""

    def normal(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Normally distributed numbers; zeros for integers, because they may be indices into tensors of any size."""
        ...

    def integers(self, end: int, shape: tuple[int, ...], dtype: str) -> Any:
        """Integers from 0 to end - 1."""
        ...

    def uniform(self, shape: tuple[int, ...]) -> Any:
        """float32 numbers from 0 to 1."""
        ...

    def cast(self, x: Any, dtype: str) -> Any:
        """The same numbers in another dtype."""
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

    def sizes(self, problem: Any) -> dict[str, int]:
        """The lengths, by name, that decide how long a problem takes: features of the search's cost model."""
        ...

    def title(self, problem: Any) -> str:
        """A short text for people: "gemm 128x3072x768 add gelu"."""
        ...

    def tensors(self, problem: Any) -> list[te.Tensor]:
        """Inputs and outputs as tensor expressions, in the problem's order of arguments; never run.

        The first output's block is called "out".
        """
        ...

    def draw(self, problem: Any, random: Random) -> list:
        """Random inputs, in order, whose outputs have magnitudes of about one."""
        ...

    def reference(self, problem: Any, inputs: list, torch: Any, keep: Any = None) -> list:
        """The outputs in PyTorch, unfused, in the inputs' own dtype: what results are compared with.

        `torch` is the module, and inputs and outputs are its tensors.  `keep` is an attention's mask, bool, and
        broadcasts to (batch, heads, q_len, kv_len); a fused segment has none.
        """
        ...
