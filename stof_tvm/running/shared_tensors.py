"""Weights that several engines have in common, held once: on the CPU by their content, on a GPU by what they copy."""

import threading
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

SAMPLE = 1 << 16  # bytes whose checksum finds the tensors that may be equal; these are then compared in full
LEAST_PART = 1 << 14  # bytes of a tensor that may be the beginning of another, and whose checksum finds that


class SharedTensors:
    """CPU tensors by their content, each for as long as somebody else holds it.  Threads may share the object.

    Parameters
    ----------
    with_parts : bool
        Whether tensors are shared that are another one's beginning, as the first rows of a table of positions are.
    """

    def __init__(self, with_parts: bool = False) -> None:
        self._with_parts = with_parts
        self._known: dict[tuple, list[TensorWeakRef]] = {}
        self._beginnings: dict[tuple, list[TensorWeakRef]] = {}
        self._lock = threading.Lock()

    def shared(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, each replaced by an earlier one of the same dtype, shape and bytes where there is one.

        They must be dense, on the CPU, and change no more.  With parts, one that is the beginning of an earlier, longer
        one is a view of that.
        """
        with self._lock:
            self._known, self._beginnings = _alive(self._known), _alive(self._beginnings)
            return [self._shared(tensor) for tensor in tensors]

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        content = _bytes(tensor)
        checksum = zlib.crc32(content[:SAMPLE].numpy().data)
        alike = self._known.setdefault((tensor.dtype, tensor.shape, checksum), [])
        for known in (ref() for ref in alike):
            if known is not None and torch.equal(_bytes(known), content):
                return known
        if self._with_parts and content.numel() >= LEAST_PART:
            tensor = self._part(tensor, content)
        alike.append(TensorWeakRef(tensor))
        return tensor

    def _part(self, tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        """The view of an earlier tensor that begins with this one; the tensor itself where there is none."""
        checksum = zlib.crc32(content[:LEAST_PART].numpy().data)
        longer = self._beginnings.setdefault((tensor.dtype, checksum), [])
        for known in (ref() for ref in longer):
            if known is not None and known.nbytes >= tensor.nbytes:
                if torch.equal(_bytes(known)[: content.numel()], content):
                    return beginning(known, tensor.shape)
        longer.append(TensorWeakRef(tensor))
        return tensor


_wholes = WeakTensorKeyDictionary()  # a view of a tensor's beginning -> that tensor


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which this one is a part, or the tensor itself."""
    return _wholes.get(tensor, tensor)


def beginning(whole: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The view of a dense tensor's first elements in a shape; its copy on a device is a view of the whole one's."""
    shape = torch.Size(shape)
    part = whole.detach().reshape(-1)[: shape.numel()].view(shape)
    _wholes[part] = whole
    return part


def _alive(known: dict[tuple, list[TensorWeakRef]]) -> dict[tuple, list[TensorWeakRef]]:
    alive = {key: [ref for ref in refs if ref() is not None] for key, refs in known.items()}
    return {key: refs for key, refs in alive.items() if refs}


_copies = WeakTensorKeyDictionary()  # tensor -> {device: weak reference to its copy there}
_copying = threading.Lock()


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; whoever asks for the same tensor gets the same copy while one of them holds it.

    It must change no more.  The copy of a part is a view of the copy of the whole.
    """
    whole = _wholes.get(tensor)
    if whole is not None:
        return beginning(on_device(whole, device), tensor.shape)
    with _copying:
        copies = _copies.setdefault(tensor, {})
        copy = copies[device]() if device in copies else None
        if copy is None:
            copy = tensor.to(device)
            copies[device] = TensorWeakRef(copy)
        return copy


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
