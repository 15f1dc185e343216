"""Guards against overflow: `if not torch.isfinite(x).all(): x = x.clamp(-most, most)`, as transformers' BART has them.

torch.export cannot follow a branch on a tensor's values.  While a model is exported, such a question is answered as if
some element were infinite, and the clamp that must follow holds each element by itself: infinities become the largest
number of the dtype, finite elements stay.  In PyTorch all elements are then clamped to `most`, which is up to 2 % less.
"""

import torch
from torch.overrides import TorchFunctionMode

from tir_kernels.errors import UnsupportedError

NEARLY = 0.98  # of the largest number, that a guard clamps to at least
QUESTIONS = {torch.isfinite: "all", torch.Tensor.isfinite: "all", torch.isinf: "any", torch.Tensor.isinf: "any"}
JOINED = {torch.all: "all", torch.Tensor.all: "all", torch.any: "any", torch.Tensor.any: "any"}
CLAMPS = (torch.clamp, torch.Tensor.clamp, torch.clip, torch.Tensor.clip)


class OverflowGuards(TorchFunctionMode):
    """A mode in which guards against overflow can be exported; other branches on values stay what they are.

    Raises UnsupportedError where a model asks whether a tensor is finite and does something else than clamp it.
    """

    def __init__(self):
        super().__init__()
        self.asked: dict[int, tuple] = {}  # id of a tensor of answers -> (it, the tensor asked about, "all" or "any")
        self.answered: dict[int, tuple] = {}  # the same for the one answer
        self.guarded: torch.Tensor | None = None  # what must be clamped next

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.guarded is not None and getattr(func, "__name__", "") != "__get__":
            return self._clamped(func, args, kwargs)
        if func is torch.Tensor.__bool__ and id(args[0]) in self.answered:
            _, self.guarded, quantifier = self.answered[id(args[0])]
            return quantifier == "any"
        result = func(*args, **kwargs)
        if func in QUESTIONS and len(args) == 1 and args[0].is_floating_point():
            self.asked[id(result)] = result, args[0], QUESTIONS[func]
        elif func in JOINED and len(args) == 1 and not kwargs and id(args[0]) in self.asked:
            _, x, quantifier = self.asked[id(args[0])]
            if JOINED[func] == quantifier:
                self.answered[id(result)] = result, x, quantifier
        return result

    def _clamped(self, func, args, kwargs):
        x, self.guarded = self.guarded, None
        assert x is not None
        low, high = (kwargs.get(name, args[i] if len(args) > i else None) for name, i in (("min", 1), ("max", 2)))
        most = torch.finfo(x.dtype).max
        is_clamp = func in CLAMPS and args and args[0] is x and all(isinstance(n, int | float) for n in (low, high))
        if not is_clamp or not -low == high or not NEARLY * most <= high <= most:
            raise UnsupportedError(
                "the model decides by whether a tensor is finite, and does something else than clamp it: "
                f"{getattr(func, '__name__', func)} follows"
            )
        return func(x, min=-most, max=most)

    def __exit__(self, kind, error, traceback):
        super().__exit__(kind, error, traceback)
        if kind is None and self.guarded is not None:
            raise UnsupportedError("the model decides by whether a tensor is finite, and then returns")
