"""Compile an imported model for this CPU and call it as the model is called; list its attention sites."""

import torch
import tvm
from torch.utils import _pytree as pytree
from tvm import relax

from relax_passes.attention.composite import is_attention
from relax_passes.legalizations import LEGALIZATIONS
from stof_tvm.frontend import import_model
from tests.models.quick_llvm import QUICK_LLVM, run_linked


def compile_imported(imported):
    """A function that takes what the model takes and returns what the model returns, run by LLVM code."""
    with QUICK_LLVM:
        mod = relax.transform.LegalizeOps(LEGALIZATIONS)(imported.mod)
    program = run_linked(tvm.compile(mod, target=QUICK_LLVM))["main"]

    def call(*args, **kwargs):
        return imported.signature.unflatten(list(program(*imported.signature.flatten(args, kwargs))))

    return call


def largest_error(result, expected) -> float:
    """Largest absolute difference of two results of one structure, and inf where structure, shape or dtype differ.

    Infinities and NaNs must be in the same places.
    """
    got, got_spec = pytree.tree_flatten(result)
    want, want_spec = pytree.tree_flatten(expected)
    if got_spec != want_spec:
        return float("inf")
    return max((_tensor_error(a, b) for a, b in zip(got, want)), default=0.0)


def _tensor_error(a, b) -> float:
    if not isinstance(b, torch.Tensor):
        return 0.0 if a == b and type(a) is type(b) else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = a.double(), b.double()
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0)) or not a[finite].isfinite().all():
        return float("inf")
    return (a[finite] - b[finite]).abs().max().item() if finite.any() else 0.0


def error_against_torch(model, args=(), kwargs=None, imported=None) -> float:
    """`largest_error` of the imported model, compiled, against `model` itself on the same inputs."""
    kwargs = kwargs or {}
    imported = imported or import_model(model, args, kwargs)
    with torch.no_grad():
        expected = model.eval()(*args, **kwargs)
    return largest_error(compile_imported(imported)(*args, **kwargs), expected)


def attention_sites(mod) -> dict[str, relax.Function]:
    """The composite functions of a module by site."""
    return {str(f.attrs["stof.site"]): f for f in mod.functions.values() if is_attention(f)}


def softmax_sites(mod) -> list[str]:
    """The module path that each softmax of "main" carries, in order."""
    return [str(call.span.source_name.name) for call in calls(mod) if call.op.name == "relax.nn.softmax"]


def operator_names(mod) -> list[str]:
    """The Relax operators of "main", in order, without "relax."."""
    return [call.op.name.removeprefix("relax.") for call in calls(mod)]


def calls(mod) -> list[relax.Call]:
    """The operator calls of "main", in order."""
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    return [v for v in values if isinstance(v, relax.Call) and isinstance(v.op, tvm.ir.Op)]
