"""Counters that a kernel finds zero and leaves zero, of which two calls that may run at once never share one.

An ordinary call clears its own.  A call that is captured in a CUDA graph gets counters that were cleared before: else
each replay would clear them, which takes 1 to 2 µs and keeps the kernel from starting early.
"""

import torch

READY = 128  # captured calls for which counters are cleared in advance …
READY_BYTES = 1 << 18  # … or as many as this holds


class Counters:
    """A number of counters for each call of one kernel on one device."""

    def __init__(self, size: int, device: torch.device):
        self.size, self.device = size, device
        self._ready: list[torch.Tensor] = []
        self._cleared: list[torch.Tensor] = []  # what graphs count in, too, lives as long as this
        self._most = min(READY, READY_BYTES // max(4 * size, 1)) if device.type == "cuda" and size else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the counters that wait for captured calls at first."""
        return 4 * self.size * self._most

    def take(self) -> torch.Tensor:
        """Counters of a call, uint32 (size,), zero when its kernel starts."""
        if not self._most:
            return torch.zeros(self.size, dtype=torch.uint32, device=self.device)
        if not torch.cuda.is_current_stream_capturing():
            if len(self._ready) <= self._most // 2:
                self._clear_more()
            return torch.zeros(self.size, dtype=torch.uint32, device=self.device)
        try:
            return self._ready.pop()
        except IndexError:  # more calls than are ready: the graph clears these
            return torch.zeros(self.size, dtype=torch.uint32, device=self.device)

    def _clear_more(self) -> None:
        zeros = torch.zeros(self._most - len(self._ready), self.size, dtype=torch.uint32, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()  # a graph may be replayed on any stream
        self._cleared.append(zeros)
        self._ready += zeros.unbind()
