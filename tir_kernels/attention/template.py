"""What attention templates offer in addition to the interface of every template (tir_kernels/template.py)."""

from collections.abc import Sequence
from typing import Any, Protocol

from tir_kernels.template import KernelConfig, Template


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


class AttentionTemplate(Template, Protocol):
    """A template of attention.

    Attributes
    ----------
    TAKES_TOKEN_STRIDES : bool
        Whether a configuration may have any `token_stride`.  If so, configurations are dataclasses with that field, and
        `configs` lists those where it is 1.
    """

    TAKES_TOKEN_STRIDES: bool

    def worth_predicting(self, configs: Sequence[Any]) -> list[Any]:
        """The configurations whose times are predicted, in order to choose the fastest; at least the default."""
        ...

    def worth_measuring(self, configs: Sequence[Any]) -> list[Any]:
        """The configurations that a search measures; at least the default."""
        ...


WITH_POSITIONS = "reads blocks of queries whose rows of the mask follow one another"  # why not, if they do not


def the_default(configs: Sequence[Any]) -> list[Any]:
    """`worth_predicting` of templates whose predicted time is the same for all configurations."""
    return list(configs[:1])


def all_of_them(configs: Sequence[Any]) -> list[Any]:
    """`worth_measuring` of templates with few configurations."""
    return list(configs)
