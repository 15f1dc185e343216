"""The tensors that an engine's calls update: a caller's, given at each call, and the model's own buffers."""

import bisect
import threading
import weakref
from collections.abc import Sequence

import torch

from stof_tvm.running.alignment import aligned
from stof_tvm.signature import Signature, StateSpec
from tir_kernels.errors import InputError


class SharedMemoryError(InputError):
    """Tensors of a call that a program cannot take for different ones."""


class Store:
    """The buffers that engines update, by name, and the turns of these engines' calls.

    Attributes
    ----------
    initial : dict
        The buffers' first values.
    members : weakref.WeakSet
        The engines.
    last_call : torch.cuda.Event or None
        The end of the last call of any of them.
    """

    def __init__(self):
        self.buffers: dict[str, torch.Tensor] = {}
        self.initial: dict[str, torch.Tensor] = {}
        self.lock = threading.Lock()
        self.last_call: torch.cuda.Event | None = None
        self.members: weakref.WeakSet = weakref.WeakSet()

    def reset(self) -> None:
        """Give the buffers their first values."""
        for name, buffer in self.buffers.items():
            _fill(buffer, self.initial[name])


class States:
    """Brings a program what it updates, and sees that each new value is where it belongs.

    Parameters
    ----------
    signature : Signature
    initial : sequence of Tensor
        The buffers' values before the first call, in the order of the signature's states.
    device : torch.device
        Where the buffers are.
    """

    def __init__(self, signature: Signature, initial: Sequence[torch.Tensor], device: torch.device):
        self._inputs, self._specs = signature.inputs, signature.states
        buffers = [state for state in self._specs if state.input is None]
        self._initial = dict(zip([state.name for state in buffers], initial, strict=True))
        self._device = device
        self._updated = signature.updated
        self._checked: list = []  # where the inputs and buffers of the last call lay
        self._own = _Ranges({})
        self._place = {state.name: len(signature.inputs) + n for n, state in enumerate(buffers)}
        self.parameters = frozenset(map(self._parameter, self._specs))  # numbers of those that a call updates
        self.kinds = {state.name: (state.dtype, state.shape) for state in buffers}

    def allocated(self, store: Store) -> dict[str, torch.Tensor]:
        """This program's buffers in a store, with their initial values where no engine had them before."""
        for name, initial in self._initial.items():
            if name not in store.buffers:
                with torch.inference_mode(False):  # else they could only be written in the mode of this call
                    buffer = torch.empty(initial.shape, dtype=initial.dtype, device=self._device)
                    store.buffers[name] = _fill(aligned(buffer), initial)
                store.initial[name] = initial
        return {name: store.buffers[name] for name in self._initial}

    def check(self, given: list[torch.Tensor], store: Store) -> None:
        """SharedMemoryError where an updated tensor shares memory with another, or with itself, of a call's inputs."""
        if not self._specs:
            return
        buffers = list(store.buffers.values())
        places = [(x.data_ptr(), x.stride()) for x in (*given, *buffers)]
        if places == self._checked:  # most calls bring the tensors of the call before
            return
        for number in self._updated:
            x = given[number]
            if any(stride == 0 and n > 1 for n, stride in zip(x.shape, x.stride())):
                raise SharedMemoryError(
                    f"{self._inputs[number].name}, which the model updates, is expanded: its elements share memory"
                )
        updated = _Ranges({n: given[n] for n in self._updated})
        own = _Ranges(dict(enumerate(buffers)))
        for number, x in enumerate(given):
            name = self._inputs[number].name
            if (other := updated.meeting(x, number)) is not None:
                raise SharedMemoryError(
                    f"{self._inputs[other].name}, which the model updates, shares memory with {name}: pass a copy of "
                    "one of them"
                )
            if (other := own.meeting(x)) is not None:
                raise SharedMemoryError(
                    f"{name} shares memory with the engine's state {list(store.buffers)[other]!r}: pass a copy"
                )
        self._checked = places

    def taken(self, given: list[torch.Tensor], store: Store) -> list[torch.Tensor]:
        """The program's parameters for a call's inputs: what is updated is dense and aligned, or a copy that is."""
        if not self._specs:
            return given
        dense = [aligned(x.resolve_neg().contiguous()) if n in self._updated else x for n, x in enumerate(given)]
        taken = [*dense, *self.allocated(store).values()]
        self._own = _Ranges({n: taken[n] for n in self.parameters})
        return taken

    def finish(self, given: list, taken: list, results: list[torch.Tensor], n_outputs: int) -> list[torch.Tensor]:
        """The outputs among a program's results, after each new value has been copied to where it is still missing."""
        if not self._specs:
            return results
        # A result may be a state's own memory, which the copies below, or the next call, would change.
        replaced = {state.output for state in self._specs if state.input is not None and state.result is None}
        results = [
            x.clone() if n not in replaced and self._own.meeting(x) is not None else x for n, x in enumerate(results)
        ]
        for state in self._specs:
            number = self._parameter(state)
            if state.result is not None:
                taken[number].copy_(results[state.result])
            if state.input is not None:
                if taken[number].data_ptr() != given[number].data_ptr():
                    given[number].copy_(taken[number])
                if state.output is not None:
                    results[state.output] = given[number]
        # Kernels wrote without PyTorch's knowledge; others may count on the number of a tensor's changes.
        torch.autograd.graph.increment_version([given[n] if n < len(given) else taken[n] for n in self.parameters])
        return results[:n_outputs]

    def _parameter(self, state: StateSpec) -> int:
        return self._place[state.name] if state.input is None else state.input


def _fill(buffer: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    """The buffer with a first value; of an expanded one, one entry crosses the bus."""
    is_expanded = initial.dim() > 0 and initial.stride(0) == 0
    return buffer.copy_(initial[:1].to(buffer.device) if is_expanded else initial)


def described(signature: Signature) -> str:
    """What calls update, and how, for a report; "" for nothing."""
    in_place = [state.name for state in signature.states if state.result is None]
    copied = [
        f"{state.name} {state.dtype}{list(state.shape)}" for state in signature.states if state.result is not None
    ]
    parts = [f"{len(in_place)} updated in place ({_some(in_place)})"] if in_place else []
    parts += [f"{len(copied)} copied after each call ({_some(copied)})"] if copied else []
    return "; ".join(parts)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


class _Ranges:
    """Where tensors lie, to find those that another one has bytes in common with, or may have.

    Strides with gaps are not looked into.
    """

    def __init__(self, tensors: dict[int, torch.Tensor]):
        ranges = ((*_range(x), number, x.device) for number, x in tensors.items() if x.numel())
        self._ranges = sorted(ranges, key=lambda entry: entry[:3])
        self._starts = [entry[0] for entry in self._ranges]
        self._longest = max((entry[1] - entry[0] for entry in self._ranges), default=0)

    def meeting(self, x: torch.Tensor, but: int | None = None) -> int | None:
        """The number of a tensor, not number `but`, that meets `x`; None if there is none."""
        if not x.numel():
            return None
        first, end = _range(x)
        for place in range(bisect.bisect_left(self._starts, end) - 1, -1, -1):
            start, last, number, device = self._ranges[place]
            if start + self._longest <= first:
                break
            if first < last and number != but and device == x.device:
                return number
        return None


def _range(x: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the one after its last; negative strides do not exist in PyTorch."""
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()
