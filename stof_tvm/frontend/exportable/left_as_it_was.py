"""A model that an export leaves as it was.

While it is traced, a model computes with tensors that have no values (FakeTensor).  Where its forward keeps one, as
rotary embeddings keep the frequencies of long inputs, PyTorch would leave it there, for the next call to find.
"""

import collections
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tir_kernels.errors import ExportError

# They hold nothing that belongs to a model alone, or nothing that can be put back.
LEAVES = (
    *(int, float, complex, str, bytes, type(None), range, slice),
    *(torch.Tensor, torch.dtype, torch.device, torch.Size),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType),
)


@contextlib.contextmanager
def left_as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards a model has what it had before, on errors as well.

    This goes for attributes of its modules, for buffers, and for lists, dicts, sets and objects that can be reached
    through them, not for what functions keep.  Raises ExportError where the model registers a buffer, which PyTorch
    takes for one of its inputs.
    """
    restore = [put_back for x in _reached(model) for put_back in _restorers(x)]
    try:
        # PyTorch takes the new value of a buffer without one for that of an input; any other attribute may be set.
        for module in model.modules():
            for name in [name for name, buffer in module._buffers.items() if buffer is None]:
                del module._buffers[name]
                vars(module)[name] = None
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        yield
        for name, _ in model.named_buffers(remove_duplicate=False):
            if name not in buffers:
                raise ExportError(
                    f"the model registers its buffer {name!r} when it is called: call it once before it is built, or "
                    "register the buffer when the model is made"
                )
    finally:
        for put_back in restore:
            put_back()


def _reached(model: torch.nn.Module) -> list:
    """The model and what can be reached from it, each once."""
    found: dict[int, Any] = {}
    stack: list = [model]
    while stack:
        x = stack.pop()
        if isinstance(x, LEAVES) or id(x) in found:
            continue
        found[id(x)] = x
        if isinstance(x, types.MethodType):
            stack.append(x.__self__)
            continue
        if isinstance(x, dict):
            stack += dict.values(x)
        elif isinstance(x, list | tuple | set | frozenset | collections.deque):
            stack += x
        if (own := _attributes(x)) is not None:
            stack += own.values()
        stack += [_value(slot, x)[1] for slot in _slots(x)]
    return list(found.values())


def _restorers(x) -> Iterator[Callable[[], None]]:
    """Functions that give an object the content and the attributes that it has now."""
    if isinstance(x, dict):
        yield _dict_restorer(x)
    elif isinstance(x, list):
        yield _sequence_restorer(x, list)
    elif isinstance(x, collections.deque):
        yield _sequence_restorer(x, collections.deque)
    elif isinstance(x, set):
        yield _set_restorer(x)
    if (own := _attributes(x)) is not None:
        yield _dict_restorer(own)
    if slots := _slots(x):
        yield _slots_restorer(slots, x)


def _dict_restorer(x: dict) -> Callable[[], None]:
    # What a subclass makes of assignments is left out: transformers' ModelOutput takes some only.
    kind: Any = collections.OrderedDict if isinstance(x, collections.OrderedDict) else dict
    keys, values = list(kind.keys(x)), list(kind.values(x))

    def put_back() -> None:
        if _are_same(list(kind.keys(x)), keys) and _are_same(list(kind.values(x)), values):
            return
        kind.clear(x)
        for key, value in zip(keys, values):
            kind.__setitem__(x, key, value)

    return put_back


def _sequence_restorer(x, kind: Any) -> Callable[[], None]:
    values = list(x)

    def put_back() -> None:
        if not _are_same(list(x), values):
            kind.clear(x)
            kind.extend(x, values)

    return put_back


def _set_restorer(x: set) -> Callable[[], None]:
    values = set(x)

    def put_back() -> None:
        if {id(value) for value in x} != {id(value) for value in values}:
            set.clear(x)
            set.update(x, values)

    return put_back


def _slots_restorer(slots: list, x) -> Callable[[], None]:
    values = [(slot, *_value(slot, x)) for slot in slots]

    def put_back() -> None:
        for slot, has_one, value in values:
            has_now, now = _value(slot, x)
            if has_one and not (has_now and now is value):
                slot.__set__(x, value)
            elif has_now and not has_one:
                slot.__delete__(x)

    return put_back


def _are_same(xs: list, ys: list) -> bool:
    return len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys))


def _attributes(x) -> dict | None:
    """An object's attributes, as they are stored."""
    with contextlib.suppress(AttributeError):
        own = object.__getattribute__(x, "__dict__")
        return own if isinstance(own, dict) else None
    return None


def _slots(x) -> list:
    """The descriptors of what an object's class has in __slots__."""
    kinds = [vars(kind) for kind in type(x).__mro__ if "__slots__" in vars(kind)]
    return [slot for own in kinds for slot in own.values() if isinstance(slot, types.MemberDescriptorType)]


def _value(slot, x) -> tuple[bool, Any]:
    """(whether an object has a value in a slot, this value)."""
    try:
        return True, slot.__get__(x)
    except AttributeError:
        return False, None
