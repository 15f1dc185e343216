"""The Identity of a function: its code, and the contents of everything that it reads besides its arguments.

The walk follows closures, globals that the code names, default arguments, attributes, partials, methods and the objects
that they belong to, and containers, down to tensors and arrays, whose elements count.  An attribute of an object or a
module counts only if some code on the way names it (`self.ids`): an inner function that captured `self` reads one
tensor of a model, not its weights.  Library code (torch, numpy, Python's own) counts by its name.  An object without
visible contents (a lock, an object of C++) counts by its address.
"""

import functools
import hashlib
import sys
import types
import weakref

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from stof_tvm.masks.identity import Identity
from tir_kernels.errors import MaskError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), torch.dtype, torch.device, np.dtype)
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}


def identity_of(function) -> Identity:
    """Equal for functions whose code is the same and reads the same contents now; the devices of tensors count.

    MaskError while a CUDA graph is captured, for tensors of a GPU that changed since they were read.
    """
    walk, parts = _walked(function)
    return Identity(parts, tuple(walk.held))


def device_of(function) -> str:
    """The device on which a function must be evaluated: that of the tensors that it captured, or "cpu"."""
    walk, _ = _walked(function)
    return next((device for device in walk.devices if device != "cpu"), "cpu")


def _walked(function) -> "tuple[_Walk, tuple]":
    walk, known = _Walk(), -1
    while len(walk.names) > known:  # code that was met on the way may name more
        known = len(walk.names)
        walk.seen.clear()
        walk.held.clear()
        parts = walk.of(function)
    return walk, parts


class _Walk:
    def __init__(self):
        self.names: set[str] = set()  # those in the code that was met
        self.seen: dict[int, int] = {}  # address of an object -> when it was met
        self.alive: list = []  # keeps objects alive, so that no other object gets an address in `seen`
        self.tensors: dict[int, tuple] = {}
        self.devices: dict[str, None] = {}
        self.held: list = []

    def of(self, x, name: str = "") -> tuple:
        """The parts of an object, as `Identity` takes them; `name` is the name by which it was found."""
        if isinstance(x, _PLAIN):
            return type(x).__name__, repr(x)
        if id(x) in self.seen:
            return "seen", self.seen[id(x)]
        self.seen[id(x)] = len(self.seen)
        self.alive.append(x)
        if isinstance(x, torch.Tensor):
            if id(x) not in self.tensors:
                self.tensors[id(x)] = self._tensor(x)
            return self.tensors[id(x)]
        if isinstance(x, np.ndarray | np.generic):
            contents = self.of(x.tolist()) if x.dtype.hasobject else np.ascontiguousarray(x).tobytes()
            return "array", str(x.dtype), x.shape, _digest(contents) if isinstance(contents, bytes) else contents
        for kind, take in _KINDS.items():
            if isinstance(x, kind):
                return take(self, x)
        return self._instance(x, name)

    def each(self, items) -> tuple:
        return tuple(self.of(x) for x in items)

    def _tensor(self, x: torch.Tensor) -> tuple:
        self.devices[str(x.device)] = None
        about = "tensor", str(x.dtype), tuple(x.shape), str(x.device)
        if x.is_meta:
            return about
        if x.layout != torch.strided:
            return (*about, _bytes_of(x.to_dense()))
        return (*about, _bytes_of(x))

    def _function(self, f: types.FunctionType) -> tuple:
        cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
        closure = tuple((name, self._cell(cell, name)) for name, cell in cells)
        attributes = self.of(f.__dict__) if f.__dict__ else ()
        state = closure, self.of(f.__defaults__), self.of(f.__kwdefaults__), attributes
        if _of_library(f.__module__):
            return "function", f.__module__, f.__qualname__, *state
        code = self._code(f.__code__)
        names = sorted(_names(f.__code__) & f.__globals__.keys())
        return "function", code, *state, tuple((name, self.of(f.__globals__[name], name)) for name in names)

    def _cell(self, cell: types.CellType, name: str = "") -> tuple:
        try:
            return self.of(cell.cell_contents, name)
        except ValueError:  # nothing was assigned yet
            return ("empty",)

    def _code(self, code: types.CodeType) -> tuple:
        self.names |= _names(code)
        return "code", code.co_code, self.each(code.co_consts), code.co_names, code.co_varnames, code.co_freevars

    def _module(self, module: types.ModuleType) -> tuple:
        found = () if _of_library(module.__name__) else sorted(self.names & module.__dict__.keys())
        return "module", module.__name__, tuple((name, self.of(module.__dict__[name], name)) for name in found)

    def _class(self, x: type, makes: bool = True) -> tuple:
        """The parts of a class; `makes` is False for that of a met object, where constructor methods do not count."""
        if _of_library(x.__module__):
            return "class", x.__module__, x.__qualname__
        # Operators call methods that no code names.
        wanted = {name for name, value in vars(x).items() if name in self.names or _is_operator(name, value)}
        wanted -= set() if makes else _MAKING
        found = tuple((name, self.of(vars(x)[name], name)) for name in sorted(wanted))
        return "class", x.__module__, x.__qualname__, found, tuple(self._class(base, makes) for base in x.__bases__)

    def _set(self, x) -> tuple:
        return type(x).__name__, tuple(sorted(Identity(self.of(e)).digest for e in x))

    def _builtin(self, x) -> tuple:
        """A function or a bound method that is written in C."""
        owner = getattr(x, "__self__", None)
        return "builtin", x.__name__, () if isinstance(owner, types.ModuleType) else self.of(owner)

    def _instance(self, x, name: str) -> tuple:
        kind = self._class(type(x), makes=False)
        contents: tuple | None = None
        if isinstance(x, list | tuple):
            contents = self.each(x)
        elif isinstance(x, dict):
            contents = tuple((self.of(key), self.of(value)) for key, value in x.items())
        state = _state(x)
        if state is None:
            return "instance", kind, self._reduced(x) if contents is None else contents
        wanted = self.names & state.keys()
        if isinstance(x, torch.nn.Module) and name != "self":  # calling it reads `forward`, which no code names
            self.names.add("forward")
            wanted = set(state)
        elif _of_library(type(x).__module__):
            wanted = set(state)
        return "instance", kind, contents, tuple((key, self.of(state[key], key)) for key in sorted(wanted))

    def _reduced(self, x) -> tuple:
        """The parts of an object written in C: what it is pickled as, else its address."""
        try:
            how = x.__reduce_ex__(4)
        except Exception:  # each type may raise its own
            how = None
        if how is None or (not isinstance(how, str) and any(part is x for part in how)):
            self.held.append(x)
            return "address", id(x)
        if isinstance(how, str):
            return "named", how
        made, *rest = how
        return "reduced", self.of(made), tuple(self.of(list(p) if hasattr(p, "__next__") else p) for p in rest)


_MAKING = {"__init__", "__new__", "__post_init__", "__init_subclass__"}
_KINDS: dict = {
    types.FunctionType: _Walk._function,
    types.MethodType: lambda walk, x: ("method", walk.of(x.__func__), walk.of(x.__self__, "self")),
    types.BuiltinFunctionType | types.MethodWrapperType: _Walk._builtin,
    functools.partial: lambda walk, x: ("partial", walk.of(x.func), walk.of(x.args), walk.of(x.keywords)),
    type: _Walk._class,
    types.ModuleType: _Walk._module,
    types.CellType: _Walk._cell,
    types.CodeType: _Walk._code,
    set | frozenset: _Walk._set,
    slice: lambda walk, x: ("slice", walk.each((x.start, x.stop, x.step))),
    property: lambda walk, x: ("property", walk.of(x.fget)),
    functools.cached_property: lambda walk, x: ("property", walk.of(x.func)),
    staticmethod | classmethod: lambda walk, x: (type(x).__name__, walk.of(x.__func__)),
    weakref.ref: lambda walk, x: ("weak", walk.of(x())),
}


def _state(x) -> dict | None:
    """Attributes by name, a torch module's parameters, buffers and modules too; None if an object can have none."""
    slots = [slot for kind in type(x).__mro__ for slot in _slots(kind)]
    if not slots and not hasattr(x, "__dict__"):
        return None
    state = {name: getattr(x, name) for name in slots if hasattr(x, name)} | getattr(x, "__dict__", {})
    if isinstance(x, torch.nn.Module):
        parts = [state.pop(name) for name in ("_parameters", "_buffers", "_modules")]
        state = {name: value for name, value in state.items() if value or not name.startswith("_")}
        for part in parts:
            state |= part
    return state


def _slots(kind: type):
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes in a code object and those nested in it, with strings that getattr may get."""
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
        elif isinstance(const, str) and const.isidentifier():
            names.add(const)
    return names


def _is_operator(name: str, value) -> bool:
    return name.startswith("__") and name.endswith("__") and isinstance(value, types.FunctionType)


def _of_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _LIBRARIES


_read_while_capturing = WeakIdKeyDictionary()  # tensor of a GPU -> (version, digest)


def _bytes_of(x: torch.Tensor) -> bytes:
    """A digest of a tensor's elements; read anew each time, as not every write increments a tensor's version."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        version, digest = _read_while_capturing.get(x, (None, b""))
        if version is None or version != x._version:
            raise MaskError("a mask's function captured a tensor that cannot be read while a CUDA graph is captured")
        return digest
    # Elements that a view repeats are hashed once; `repeated` distinguishes such a view from others.
    once = x.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
    flat = torch.empty(once.shape, dtype=once.dtype).copy_(once.resolve_conj().resolve_neg()).reshape(-1)
    repeated = bytes(stride == 0 for stride in x.stride())
    digest = _digest(repeated + b"|", flat.view(torch.uint8).numpy())
    if x.is_cuda and not x.is_inference():
        _read_while_capturing[x] = x._version, digest
    return digest


def _digest(*data) -> bytes:
    sha = hashlib.sha256()
    for each in data:
        sha.update(each)
    return sha.digest()
