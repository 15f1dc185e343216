"""Models that choose the class of an attention from a table by the implementation's name, where "stof" is none.

Falcon, GPT-J, GPT-Neo, Bark, SAM and some others do not ask transformers' AttentionInterface: a module of theirs has a
table {"eager": class, "sdpa": class, …}, and a name that is not in it ends as a KeyError in a layer's constructor.
"""

import functools
import sys

from torch import nn
from transformers import PreTrainedModel

from tir_kernels.errors import UnsupportedError


def refuse_in_class_tables(name: str) -> None:
    """Let an implementation raise UnsupportedError where a model looks for its class in such a table.

    transformers checks the name before a model makes its layers.  Then the tables of the model's module get a function
    under this name, so that only a model that looks there is refused.
    """
    check = PreTrainedModel._check_and_adjust_attn_implementation
    if name in getattr(check, "refused", ()):
        return

    @functools.wraps(check)
    def checked(self, attn_implementation, *args, **kwargs):
        if attn_implementation == name:
            for table, classes in class_tables(sys.modules[type(self).__module__]).items():
                classes.setdefault(name, functools.partial(_refused, name, table, type(self).__name__))
        return check(self, attn_implementation, *args, **kwargs)

    checked.refused = (*getattr(check, "refused", ()), name)  # type: ignore[attr-defined]  # of a function
    PreTrainedModel._check_and_adjust_attn_implementation = checked


def class_tables(module) -> dict[str, dict]:
    """The module's dicts from implementations' names, "eager" among them, to classes of layers, by their names."""

    def is_table(value) -> bool:
        return (
            isinstance(value, dict) and isinstance(value.get("eager"), type) and issubclass(value["eager"], nn.Module)
        )

    return {name: value for name, value in vars(module).items() if is_table(value)}


def _refused(name: str, table: str, model: str, *_args, **_kwargs):
    raise UnsupportedError(
        f"{model} chooses the class of its attention from {table}, which has no {name!r} and cannot be given one: load "
        "it without attn_implementation, and compile it by stof_tvm.build or torch.compile(model, backend='stof')"
    )
