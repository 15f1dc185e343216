"""Weights that several engines have in common, held once: on the CPU by their content, on a GPU by what they copy."""

import threading
import zlib
from collections.abc import Iterable

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

SAMPLE = 1 << 16  # bytes whose checksum finds the tensors that may be equal; these are then compared in full


class SharedTensors:
    """CPU tensors by their content, each for as long as somebody else holds it.  Threads may share the object."""

    def __init__(self) -> None:
        self._known: dict[tuple, list[TensorWeakRef]] = {}
        self._lock = threading.Lock()

    def shared(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, each replaced by an earlier one of the same dtype, shape and bytes where there is one.

        They must be dense, on the CPU, and change no more.
        """
        with self._lock:
            alive = {key: [ref for ref in refs if ref() is not None] for key, refs in self._known.items()}
            self._known = {key: refs for key, refs in alive.items() if refs}
            return [self._shared(tensor) for tensor in tensors]

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        content = _bytes(tensor)
        checksum = zlib.crc32(content[:SAMPLE].numpy().data)
        alike = self._known.setdefault((tensor.dtype, tensor.shape, checksum), [])
        for known in (ref() for ref in alike):
            if known is not None and torch.equal(_bytes(known), content):
                return known
        alike.append(TensorWeakRef(tensor))
        return tensor


_copies = WeakTensorKeyDictionary()  # tensor -> {device: weak reference to its copy there}
_copying = threading.Lock()


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; whoever asks for the same tensor gets the same copy while one of them holds it.

    It must change no more.
    """
    with _copying:
        copies = _copies.setdefault(tensor, {})
        copy = copies[device]() if device in copies else None
        if copy is None:
            copy = tensor.to(device)
            copies[device] = TensorWeakRef(copy)
        return copy


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
