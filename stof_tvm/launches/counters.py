"""Counters that a kernel finds zero and leaves zero, of which two calls that may run at once never share one.

An ordinary call clears its own.  A call that is captured in a CUDA graph gets counters that were cleared before: else
each replay would clear them, which takes 1 to 2 µs and keeps the kernel from starting early.
"""

import torch

READY = 128  # captured calls for which counters are cleared in advance …
READY_BYTES = 1 << 18  # … or as many as this holds


def is_captured(device: torch.device) -> bool:
    """Whether what is launched on a device now becomes part of a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class Counters:
    """A number of counters for each call of one kernel on one device.

    Those for captured calls are cleared here, once: later calls, of whatever thread, must not synchronize.  They are
    not taken back, since nobody tells when a graph is gone, and held as long as this is.
    """

    def __init__(self, size: int, device: torch.device):
        self.size, self.device = size, device
        count = min(READY, READY_BYTES // max(4 * size, 1)) if device.type == "cuda" and size else 0
        self._cleared = torch.zeros(count, size, dtype=torch.uint32, device=device if count else "cpu")
        self._ready = list(self._cleared.unbind())
        if count:
            torch.cuda.current_stream(device).synchronize()  # a graph may be replayed on any stream

    @property
    def nbytes(self) -> int:
        """Bytes of the counters for captured calls."""
        return self._cleared.nbytes

    def take(self) -> torch.Tensor:
        """Counters of a call, uint32 (size,), zero when its kernel starts."""
        if self._ready and is_captured(self.device):
            try:
                return self._ready.pop()
            except IndexError:  # another thread took the last one
                pass
        return torch.zeros(self.size, dtype=torch.uint32, device=self.device)
