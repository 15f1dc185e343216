"""The tensors that an engine's calls update: a caller's, given at each call, and the model's own buffers."""

from collections.abc import Sequence

import torch

from stof_tvm.running.alignment import aligned
from stof_tvm.signature import Signature, StateSpec
from tir_kernels.errors import InputError


class States:
    """Brings a program what it updates, and sees that each new value is where it belongs.

    Parameters
    ----------
    signature : Signature
    initial : sequence of Tensor
        The buffers' values before the first call, in the order of the signature's states.
    """

    def __init__(self, signature: Signature, initial: Sequence[torch.Tensor] = ()):
        self._inputs, self._specs, self._initial = signature.inputs, signature.states, initial
        buffers = [state for state in self._specs if state.input is None]
        self._place = {state.name: len(signature.inputs) + n for n, state in enumerate(buffers)}
        self.buffers: dict[str, torch.Tensor] = {}  # by name; engines that share states share this dict
        self.kinds = {state.name: (state.dtype, state.shape) for state in buffers}

    def __bool__(self) -> bool:
        return bool(self._specs)

    @property
    def parameters(self) -> frozenset[int]:
        """Numbers of the program's parameters that a call updates."""
        return frozenset(map(self._parameter, self._specs))

    def allocate(self, device) -> None:
        """Make the buffers, on a device, with their initial values, unless another engine did."""
        if self.buffers:
            return
        made = [aligned(x.to(device, copy=True)) for x in self._initial]
        self.buffers.update(zip(self._place, made, strict=True))

    def reset(self) -> None:
        """Give the buffers their initial values."""
        for name, initial in zip(self._place, self._initial, strict=True):
            buffer = self.buffers[name]
            buffer.copy_(initial)
            torch.autograd.graph.increment_version(buffer)

    def taken(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """The program's parameters for a call's inputs: what is updated is dense and aligned, or a copy that is.

        Raises InputError where an updated input shares memory with another input.
        """
        if not self._specs:
            return given
        updated = {state.input for state in self._specs if state.input is not None}
        for number in updated:
            for other in range(len(given)):
                if other != number and _meet(given[number], given[other]):
                    raise InputError(
                        f"{self._inputs[number].name}, which the model updates, shares memory with "
                        f"{self._inputs[other].name}: pass a copy of one of them"
                    )
        dense = [aligned(x.resolve_neg().contiguous()) if n in updated else x for n, x in enumerate(given)]
        return [*dense, *(self.buffers[name] for name in self._place)]

    def finish(self, given: list, taken: list, results: list[torch.Tensor], n_outputs: int) -> list[torch.Tensor]:
        """The outputs among a program's results, after each new value has been copied to where it is still missing."""
        if not self._specs:
            return results
        # A result may be a state's own memory, which the copies below, or the next call, would change.
        own = [taken[number] for number in self.parameters]
        replaced = {state.output for state in self._specs if state.input is not None and state.result is None}
        results = [
            x.clone() if n not in replaced and any(_meet(x, state) for state in own) else x
            for n, x in enumerate(results)
        ]
        for state in self._specs:
            number = self._parameter(state)
            if state.result is not None:
                taken[number].copy_(results[state.result])
            if state.input is not None and taken[number].data_ptr() != given[number].data_ptr():
                given[number].copy_(taken[number])
            # Kernels wrote without PyTorch's knowledge; others may count on the number of a tensor's changes.
            torch.autograd.graph.increment_version(taken[number] if state.input is None else given[number])
            if state.output is not None and state.input is not None:
                results[state.output] = given[state.input]
        return results[:n_outputs]

    def _parameter(self, state: StateSpec) -> int:
        return self._place[state.name] if state.input is None else state.input


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


def _meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have bytes in common, or may have: strides with gaps are not looked into."""
    if not x.numel() or not y.numel() or x.device != y.device:
        return False
    (first, last), (other, end) = _range(x), _range(y)
    return first < end and other < last


def _range(x: torch.Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()
