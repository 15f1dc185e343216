"""What attention templates offer beside what every template does (tir_kernels/template.py)."""

from collections.abc import Sequence
from typing import Any, Protocol

from tir_kernels.template import KernelConfig, Template


class AttentionConfig(KernelConfig, Protocol):
    """A configuration that reads a mask in blocks of block_m query rows by block_n keys, of tokens token_stride apart.

    What no field decides is a class variable.
    """

    @property
    def block_m(self) -> int: ...

    @property
    def block_n(self) -> int: ...

    @property
    def token_stride(self) -> int: ...


class AttentionTemplate(Template, Protocol):
    """A template of attention.

    Attributes
    ----------
    TAKES_TOKEN_STRIDES : bool
        Whether any `token_stride` is legal in a configuration; `configs` gives those with 1.  Such a configuration is a
        dataclass with that field.
    """

    TAKES_TOKEN_STRIDES: bool

    def worth_predicting(self, configs: Sequence[Any]) -> list[Any]:
        """Those of `configs` among which the least predicted time decides; the default at least."""
        ...

    def worth_measuring(self, configs: Sequence[Any]) -> list[Any]:
        """Those of `configs` that a search measures; the default at least."""
        ...


def the_default(configs: Sequence[Any]) -> list[Any]:
    """`worth_predicting` where nothing predicts one configuration to be faster than another."""
    return list(configs[:1])


def all_of_them(configs: Sequence[Any]) -> list[Any]:
    """`worth_measuring` where there are few."""
    return list(configs)
