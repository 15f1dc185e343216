"""The interface of every kernel template, for attention and for fused segments.

A template is a module, or anything with these attributes.  Callers ask the template itself for all that differs between
templates, so code that chooses, tunes or lowers does not depend on which template it has.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import tvm

from tir_kernels.errors import InputError

Spec = tuple[tuple[int, ...], str]  # shape and dtype


class KernelConfig(Protocol):
    """How a template computes a problem: a frozen dataclass whose integers and booleans are the decisions of tuning."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __hash__(self) -> int: ...

    @property
    def label(self) -> str:
        """The configuration as reports show it: "64x64 4 warps 2 stages"."""
        ...


class Operands(NamedTuple):
    """What a kernel takes between its inputs and its outputs, in order.

    constants : tuple of np.ndarray
        Arrays that the kernel only reads, such as a mask's lists.
    workspace : tuple of (shape, dtype)
        Buffers that the kernel writes; each launch may reuse them.  Integers are zero before the first launch, floats
        may hold anything.  Launches that share these buffers must follow one another, unless they leave it unwritten.
    unwritten : bool
        Whether the kernel writes nothing to this workspace, as where no block row is split.
    """

    constants: tuple[np.ndarray, ...] = ()
    workspace: tuple[Spec, ...] = ()
    unwritten: bool = False

    @classmethod
    def of(cls, constants: Iterable[np.ndarray], zeros: Iterable[np.ndarray], unwritten: bool = False) -> "Operands":
        """Operands from arrays; `zeros` give the shapes and dtypes of the workspace."""
        return cls(tuple(constants), tuple((x.shape, str(x.dtype)) for x in zeros), unwritten)

    @property
    def arrays(self) -> list[np.ndarray]:
        """All operands as arrays, the workspace as zeros."""
        return [*self.constants, *(np.zeros(shape, dtype) for shape, dtype in self.workspace)]


class Template(Protocol):
    """A kernel template.

    Attributes
    ----------
    NAME : str
        "row-chain"; unique among the templates of a kind of target.
    TARGET_KIND : str
        "cuda" or "llvm".
    Config : type
        The class of its configurations.

    Two more attributes are optional.  `IS_PROPOSED = False`: only a search may choose the template.
    `DEFERS_NORMS = True`: norms before and after the template's products may be deferred to it (fusion/problem.py).
    """

    NAME: str
    TARGET_KIND: str

    @property
    def Config(self) -> type[KernelConfig]: ...

    def __hash__(self) -> int: ...

    def unsupported(self, problem: Any, target: tvm.target.Target) -> str | None:
        """Why the template cannot compute a problem on a target, or None if it can; the report shows the reason."""
        ...

    def configs(self, problem: Any, target: tvm.target.Target) -> Sequence[Any]:
        """The legal configurations, at least one, of a problem that the template computes; the default comes first."""
        ...

    def predict_us(self, problem: Any, config: Any, target: tvm.target.Target, forms: Any = None) -> float:
        """Predicted microseconds of the kernel.

        `forms` holds an attention's mask (attention/mask_forms.py), with its tokens in the configuration's order.  None
        is a mask that keeps everything; for fused segments it is always None.
        """
        ...

    def operands(self, problem: Any, config: Any, target: tvm.target.Target, mask: Any = None) -> Operands:
        """What the kernel takes besides its inputs and outputs; the work is divided for the target's GPU.

        `mask` is an attention's BlockSparseMask, stored in the blocks of the configuration.  None is a mask that keeps
        everything; for fused segments it is always None.  Raises MaskError for a mask that does not fit.
        """
        ...

    def instantiate(self, problem: Any, config: Any, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
        """The kernel; arguments are the problem's inputs, the operands, and the problem's outputs."""
        ...


def template_name(template: Template) -> str:
    """A name that is unique among all templates, such as "cuda gemm"."""
    return f"{template.TARGET_KIND} {template.NAME}"


def config_to_json(config: KernelConfig) -> dict[str, int]:
    """The fields of a configuration as integers, in their order: the form that tuning logs store."""
    return {name: int(getattr(config, name)) for name in _field_names(type(config))}


def config_from_json(template: Template, values: dict[str, Any]) -> Any:
    """The inverse of `config_to_json`, for a template's configuration; fields with defaults may be missing.

    Raises InputError for fields that the configuration does not have, and for missing fields without a default.
    """
    name = template_name(template)
    known = {field.name: field.type for field in dataclasses.fields(template.Config)}
    if unknown := values.keys() - known.keys():
        raise InputError(f"template {name!r} has no field {', '.join(sorted(unknown))}")
    try:
        return template.Config(**{field: known[field](value) for field, value in values.items()})  # type: ignore[operator]
    except TypeError as error:
        raise InputError(f"template {name!r}: {error}") from None


def has_json(config_class: object) -> bool:
    """Whether `config_to_json` can write objects of a class: it must be a dataclass of integers and booleans."""
    return dataclasses.is_dataclass(config_class) and all(
        field.type in (int, bool) for field in dataclasses.fields(config_class)
    )


@cache
def _field_names(config_class) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(config_class))
