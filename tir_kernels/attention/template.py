"""What attention templates offer in addition to the interface of every template (tir_kernels/template.py)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import tvm

from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.template import KernelConfig, Operands, Spec, Template

if TYPE_CHECKING:
    from tir_kernels.attention.block_maps.plan import Reader


class AttentionConfig(KernelConfig, Protocol):
    """A configuration that reads masks in blocks of block_m query rows by block_n keys, of tokens token_stride apart.

    A value that tuning does not decide is a class variable instead of a field.
    """

    @property
    def block_m(self) -> int: ...

    @property
    def block_n(self) -> int: ...

    @property
    def token_stride(self) -> int: ...


class Step(NamedTuple):
    """A PrimFunc, schedulable or scheduled, of the named inputs and then the outputs, given by name in order."""

    function: tvm.tirx.PrimFunc
    inputs: tuple[str, ...]
    outputs: dict[str, Spec]


class Plan(NamedTuple):
    """How a kernel's operands are computed at run time from the problem's positions or its block map.

    constants : dict of np.ndarray
        By name, the arrays that steps read; "positions" or "block_map" is another name that they read.
    steps : dict of Step
        By name, in order.
    operands : tuple of str
        The outputs that the kernel takes, in place of that operand and of the operands that are constants.
    rest : Operands
        The operands after them.
    """

    constants: dict[str, np.ndarray]
    steps: dict[str, Step]
    operands: tuple[str, ...]
    rest: Operands


class AttentionTemplate(Template, Protocol):
    """A template of attention.

    Attributes
    ----------
    TAKES_TOKEN_STRIDES : bool
        Whether a configuration may have any `token_stride`.  If so, configurations are dataclasses with that field, and
        `configs` lists those where it is 1.
    """

    TAKES_TOKEN_STRIDES: bool

    def plan(self, problem: Any, config: Any, target: tvm.target.Target, mask: BlockSparseMask) -> Plan | None:
        """The plan of a problem with positions or a block map; None if the kernel takes such an operand itself."""
        ...

    def reader(self, problem: Any, config: Any, target: tvm.target.Target) -> "Reader | None":
        """How the kernel reads lists that are written at run time; None if it reads none."""
        ...

    def worth_predicting(self, configs: Sequence[Any]) -> list[Any]:
        """The configurations whose times are predicted, in order to choose the fastest; at least the default."""
        ...

    def worth_measuring(self, configs: Sequence[Any]) -> list[Any]:
        """The configurations that a search measures; at least the default."""
        ...


WITH_POSITIONS = "reads blocks of queries whose rows of the mask follow one another"  # why not, if they do not
WITH_BLOCK_MAP = "reads no block map that is known at run time"

WITH_KEY_COUNT = "reads no key count that is known at run time"


def no_plan(problem: Any, config: Any, target: tvm.target.Target, mask: BlockSparseMask) -> None:
    """`plan` of templates that take what is known at run time themselves, or not at all."""


def no_reader(problem: Any, config: Any, target: tvm.target.Target) -> None:
    """`reader` of templates that read no lists that are written at run time."""


def the_default(configs: Sequence[Any]) -> list[Any]:
    """`worth_predicting` of templates whose predicted time is the same for all configurations."""
    return list(configs[:1])


def all_of_them(configs: Sequence[Any]) -> list[Any]:
    """`worth_measuring` of templates with few configurations."""
    return list(configs)
