"""`build(dynamic_shapes=…, verify=True)`: a padded program compared with the model, both in PyTorch."""

import types
import warnings
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from stof_tvm.frontend.source import source_of
from stof_tvm.verification.comparison import judge
from stof_tvm.verification.reference import Reference
from stof_tvm.verification.verify import PYTORCH_FAILS, leaves_of_call, wider_dtype
from tir_kernels.errors import ExportError, InputError, VerificationError


def check_padding(
    model,
    call: tuple,
    exported: torch.export.ExportedProgram,
    padded: torch.export.ExportedProgram,
    padded_call: tuple,
    cut: Callable,
) -> None:
    """Compare the part of a padded program's results that `cut` leaves with those of the model.

    Parameters
    ----------
    model : torch.nn.Module or ExportedProgram
    call, padded_call : (tuple, dict)
        Inputs of the model, and of the padded program.
    exported, padded : ExportedProgram
        The model's program at the sizes of the call, and at larger ones.
    cut : callable
        From the leaves of the padded program's results to those of the model's.

    Raises VerificationError where they differ by more than roundings, ExportError where the model's have no values.
    """
    try:
        expected = _leaves(model, call)
    except ExportError:  # the export has left tensors without values in the model's caches
        raise
    except Exception as error:  # whatever a model raises
        warnings.warn(f"the padded program was not verified: {PYTORCH_FAILS}: {error}", stacklevel=2)
        return
    args, kwargs = call
    actual = _reference(padded, cut)(*padded_call)
    dtype = wider_dtype([*pytree.tree_leaves(call), *padded.state_dict.values(), *expected])
    wider = None if dtype is None else _reference(exported, list).precise(args, kwargs, dtype)
    for number, (x, y) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(y, torch.Tensor):
            verdict = judge(x, y, lambda n=number: None if wider is None else wider[n], lambda: None)  # type: ignore
            if not verdict.is_right:
                sizes = ", ".join(str(tuple(x.shape)) for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor))
                raise VerificationError(
                    f"the program for a range of shapes does not compute what the model does for inputs of {sizes}: "
                    f"output {number}: {verdict}.  lazy=True compiles each shape by itself"
                )


def check_largest(model, example: tuple, largest: tuple, told: str) -> None:
    """InputError where PyTorch computes the model's example and not the largest sizes of a range, called `told`.

    So it is with positions behind the end of a table, for which an engine would give NaN.  `model` is an nn.Module or
    an ExportedProgram, and `example` and `largest` are (args, kwargs).  Too little memory in PyTorch is no error.
    """
    try:
        _leaves(model, largest)
    except Exception as error:  # whatever a model raises
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error):
            return
        try:
            _leaves(model, example)
        except Exception:  # then PyTorch does not compute the model here
            return
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"the model does not take inputs of {told}, the largest of the range: {line}. Give the Dim a smaller max"
        ) from error


def _leaves(model, call: tuple) -> list:
    """The leaves of what PyTorch computes for (args, kwargs)."""
    if isinstance(model, torch.nn.Module):
        return leaves_of_call(model, *call)
    with torch.no_grad():
        return pytree.tree_leaves(model.module()(*call[0], **call[1]))


def _reference(program: torch.export.ExportedProgram, part: Callable) -> Reference:
    imported = types.SimpleNamespace(source=source_of(program), states=(), site_nodes={})
    return Reference(imported, part=part)  # type: ignore[arg-type]  # what it reads of an ImportedModel
