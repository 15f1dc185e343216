"""The interface of every kernel template, for attention and for fused segments.

A template is a module, or anything with these attributes.  What differs between templates is asked of them, so that no
one who chooses, tunes or lowers looks at which one it is.
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
    """How a template computes a problem: a frozen dataclass of integers and booleans, the decisions of tuning."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __hash__(self) -> int: ...

    @property
    def label(self) -> str:
        """As reports show it: "64x64 4 warps 2 stages"."""
        ...


class Operands(NamedTuple):
    """What a kernel takes between its inputs and its outputs, in order.

    constants : tuple of np.ndarray
        Arrays that the kernel only reads, such as a mask's lists.
    workspace : tuple of (shape, dtype)
        Buffers that it writes, usable again after each launch: integers are zero before the first one, floats hold
        anything.  Launches that share them must follow one another.
    """

    constants: tuple[np.ndarray, ...] = ()
    workspace: tuple[Spec, ...] = ()

    @classmethod
    def of(cls, constants: Iterable[np.ndarray], zeros: Iterable[np.ndarray]) -> "Operands":
        """From the arrays themselves, those of the workspace as zeros."""
        return cls(tuple(constants), tuple((x.shape, str(x.dtype)) for x in zeros))

    @property
    def arrays(self) -> list[np.ndarray]:
        """All of them, the workspace as zeros."""
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
        Of its configurations.

    Two more attributes may be there.  `IS_PROPOSED = False`: only a search may choose it.  `DEFERS_NORMS = True`: norms
    around it may be left to it (fusion/problem.py).
    """

    NAME: str
    TARGET_KIND: str

    @property
    def Config(self) -> type[KernelConfig]: ...

    def __hash__(self) -> int: ...

    def unsupported(self, problem: Any, target: tvm.target.Target) -> str | None:
        """Why it cannot compute a problem on a target, or None; the report shows it."""
        ...

    def configs(self, problem: Any, target: tvm.target.Target) -> Sequence[Any]:
        """The legal configurations of a problem that it computes, the default first; never none."""
        ...

    def predict_us(self, problem: Any, config: Any, target: tvm.target.Target, forms: Any = None) -> float:
        """Predicted microseconds of the kernel.

        `forms` are an attention's mask (attention/mask_forms.py), with its tokens in the configuration's order; None
        keeps everything; fused segments always pass None.
        """
        ...

    def operands(self, problem: Any, config: Any, target: tvm.target.Target, mask: Any = None) -> Operands:
        """What the kernel takes beside its inputs and outputs; work is divided for the target's GPU.

        `mask` is an attention's BlockSparseMask, stored for the configuration; None keeps everything; fused
        segments always pass None.  Raises MaskError for one that does not fit.
        """
        ...

    def instantiate(self, problem: Any, config: Any, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
        """The kernel; arguments are the problem's inputs, the operands, and the problem's outputs."""
        ...


def template_name(template: Template) -> str:
    """Unique among all templates: "cuda gemm"."""
    return f"{template.TARGET_KIND} {template.NAME}"


def config_to_json(config: KernelConfig) -> dict[str, int]:
    """The fields of a configuration as integers, in their order: what tuning logs hold of it."""
    return {name: int(getattr(config, name)) for name in _field_names(type(config))}


def config_from_json(template: Template, values: dict[str, Any]) -> Any:
    """The inverse, for a template's configuration; fields with defaults may be missing.

    Raises InputError for fields that the configuration does not have, and for those that are missing.
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
    """Whether a class is of configurations that `config_to_json` can write: a dataclass of integers and booleans."""
    return dataclasses.is_dataclass(config_class) and all(
        field.type in (int, bool) for field in dataclasses.fields(config_class)
    )


@cache
def _field_names(config_class) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(config_class))
