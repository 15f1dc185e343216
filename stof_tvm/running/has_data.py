"""Tensors without data: those of a function that PyTorch traces or transforms, which no kernel can compute with."""

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tir_kernels.errors import InputError


def has_data(x: torch.Tensor) -> bool:
    """Whether a tensor's elements are in memory: not those of FakeTensor, DTensor or "meta", nor within torch.vmap."""
    if type(x) is not torch.Tensor and isinstance(x, torch._subclasses.FakeTensor):  # it warns when it is asked
        return x.numel() == 0
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:  # it has no storage
        return False


def check_has_data(name: str, x: torch.Tensor, told: str) -> None:
    """InputError for a dense tensor without data; `told` says what computes, and what to do."""
    if not has_data(x):
        raise InputError(f"{without_data(name, x)}: {told}")


def without_data(name: str, x: torch.Tensor) -> str:
    """What a tensor without data is, for a message."""
    if x.is_meta:
        return f"{name} is on meta, where tensors have no data"
    return (
        f"{name} is a {type(x).__name__} without data, as PyTorch has where it traces or transforms a function "
        "(torch.export, FakeTensorMode, torch.vmap)"
    )


def check_makes_data(told: str) -> None:
    """InputError where new tensors have no data, or become constants of a graph; `told` as in `check_has_data`."""
    if torch.jit.is_tracing() or (is_in_torch_dispatch_mode() and _is_traced()):
        raise InputError(f"PyTorch traces this call, as torch.export, make_fx, torch.jit and FakeTensorMode do: {told}")


def _is_traced() -> bool:
    """Whether this thread traces: modes before dispatch are in a list of all threads, their key in a set of each."""
    is_proxied = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    is_proxied_before = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
    return is_proxied or is_proxied_before or not has_data(torch.empty(1))
