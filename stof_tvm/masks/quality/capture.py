"""The attentions of a model while it runs in PyTorch: every call of scaled_dot_product_attention, by module path."""

import contextlib
import inspect
import reprlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stof_tvm.masks.quality.weights import Attention, check_attention, default_scale
from tir_kernels.errors import InputError, UnsupportedError

# Parameters of F.scaled_dot_product_attention, whose own signature Python does not know.
PARAMETERS = inspect.signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: None
)
Receive = Callable[[str, Attention, torch.Tensor], None]


@contextlib.contextmanager
def captured(model: torch.nn.Module, receive: Receive) -> Iterator[None]:
    """While the context is open, `receive(path, attention, out)` is called for each attention that the model computes.

    A path is the one by which `build` names it: that of the innermost module, with "#1", "#2"… appended from its second
    attention on; counting begins anew with each call of the model.  `out` is the attention's result, (B, H, Sq, Dv).
    What PyTorch computes in one piece otherwise (nn.MultiheadAttention's fast path) is computed in steps.  Raises
    UnsupportedError for an attention with dropout, whose operands do not have four dimensions, or in a module that the
    model holds under several names: `build` knows it by the name of each call, which a running model does not tell.
    """
    calls = _Calls(model, receive)
    fast = torch.backends.mha.get_fastpath_enabled()
    original = F.scaled_dot_product_attention

    def attend(*args, **kwargs):
        return calls.attend(original, args, kwargs)

    with contextlib.ExitStack() as stack:
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        # A mode sees what was imported from torch by name; what torch's own functions call, which run with modes
        # suspended, it does not see.
        F.scaled_dot_product_attention = attend
        stack.callback(setattr, F, "scaled_dot_product_attention", original)
        names: dict[torch.nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(path)
        for module, paths in names.items():
            enter, leave = calls.hooks(paths)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(_Mode(calls, original))
        yield


class _Mode(TorchFunctionMode):
    def __init__(self, calls: "_Calls", original):
        super().__init__()
        self.calls, self.original = calls, original

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is self.original:
            return self.calls.attend(self.original, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Calls:
    """Where the model is, and how many attentions each of its modules has computed."""

    def __init__(self, model: torch.nn.Module, receive: Receive):
        self.model, self.receive = model, receive
        self.stack: list[list[str]] = []  # the names of each module that is being called
        self.counts: dict[str, int] = {}

    def hooks(self, paths: list[str]):
        def enter(module, args):
            if not self.stack:
                self.counts.clear()
            self.stack.append(paths)

        def leave(module, args, result):
            self.stack.pop()

        return enter, leave

    def attend(self, original, args: tuple, kwargs: dict):
        call = PARAMETERS.bind(*args, **kwargs)
        call.apply_defaults()
        with torch._C.DisableTorchFunction():
            out = original(*args, **kwargs)
        path, *others = self.stack[-1] if self.stack else [""]
        if others:
            raise UnsupportedError(
                f"attention {path!r} is in a module that the model also holds as {', '.join(map(repr, others[:3]))}"
                f"{', …' if others[3:] else ''}: build names it by the name of each call, which is not known here; "
                "hold it under one name, and call that as often as needed, or hold copies"
            )
        count = self.counts[path] = self.counts.get(path, -1) + 1
        self.receive(f"{path}#{count}" if count else path, _attention(path, call.arguments), out)
        return out


def _attention(path: str, call: dict) -> Attention:
    q, k, v, scale, bias = (call[name] for name in ("query", "key", "value", "scale", "attn_mask"))
    if call["dropout_p"]:
        raise UnsupportedError(f"attention {path!r} has dropout_p={call['dropout_p']}: masks are chosen in eval mode")
    if q.ndim != 4:
        raise UnsupportedError(f"attention {path!r} has q of shape {tuple(q.shape)}; four dimensions are supported")
    check_attention(q, k, v)
    bias = None if bias is None else bias.detach()
    scale = default_scale(q) if scale is None else scale
    return Attention(q.detach(), k.detach(), v.detach(), scale, call["is_causal"], bias)


def check_model(model) -> None:
    """InputError unless it is a module."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__} {reprlib.repr(model)}")


def call_of(sample) -> tuple[tuple, dict]:
    """Arguments of a call of a model from a tensor, a tuple or a dict; InputError for anything else."""
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, tuple | list):
        return tuple(sample), {}
    raise InputError(f"a sample is a tuple, a dict or a tensor, got {type(sample).__name__} {reprlib.repr(sample)}")
