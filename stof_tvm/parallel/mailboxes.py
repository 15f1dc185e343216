"""Memory of two GPUs of one host that each lets the other write: boxes for what kernels send while they compute.

The memory is PyTorch's symmetric memory, peer to peer over NVLink or PCIe, without multicast.
"""

import itertools
import socket
import weakref

import torch
import torch.distributed as dist
import tvm_ffi

from relax_passes.parallel.placement import BoxFunctions
from stof_tvm.parallel.ranks import Peers

EXCHANGE = "an exchange of terms"
ALIGNMENT = 256  # bytes
MILLISECONDS = 1000
_numbers = itertools.count()


class PeerMemory:
    """The boxes of an engine's programs, which it owns (`Mailboxes`).

    They are allocated in the first call, by both ranks together.
    """

    def __init__(self, peers: Peers):
        self.peers = peers
        self._names: list[str] = []
        weakref.finalize(self, _remove, self._names).atexit = False

    def boxes(self, count: int, nbytes: int) -> BoxFunctions:
        """The functions of `count` new boxes of so many bytes."""
        boxes, number = _Boxes(self.peers, count, nbytes), next(_numbers)
        functions = BoxFunctions(*(f"stof.boxes.{number}.{field}" for field in BoxFunctions._fields))
        for field, name in functions._asdict().items():
            tvm_ffi.register_global_func(name, getattr(boxes, field))
        self._names += functions
        return functions


class _Boxes:
    """Boxes of one program."""

    def __init__(self, peers: Peers, count: int, nbytes: int):
        self.peers, self.count = peers, count
        self.size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._memory: torch.Tensor | None = None
        self._views: dict[tuple, object] = {}

    def inbox(self, number: int, shape, dtype):
        return self._view(self.peers.rank, number, shape, dtype)

    def outbox(self, number: int, shape, dtype):
        return self._view(1 - self.peers.rank, number, shape, dtype)

    def arrive(self) -> None:
        self._allocate()
        with self.peers.answering(EXCHANGE):
            self.peers.begin()
            # A kernel on the current stream that waits for the other rank's; it ends the process's use of the GPU where
            # that one does not come in time.
            self._handle.barrier(channel=0, timeout_ms=int(self.peers.seconds * MILLISECONDS))

    def send(self, tensor, number: int) -> None:
        tensor = torch.from_dlpack(tensor)
        self._allocate()
        self._tensor(1 - self.peers.rank, number, tensor.shape, tensor.dtype).copy_(tensor)
        self.arrive()

    def receive(self, tensor, number: int) -> None:
        self._allocate()
        tensor = torch.from_dlpack(tensor)
        tensor.copy_(self._tensor(self.peers.rank, number, tensor.shape, tensor.dtype))

    def _view(self, rank: int, number: int, shape, dtype):
        """A box as a tensor of TVM's, the same object each time."""
        key = rank, number, tuple(shape), str(dtype)
        if key not in self._views:
            self._allocate()
            tensor = self._tensor(rank, number, tuple(shape), getattr(torch, str(dtype)))
            self._views[key] = tvm_ffi.from_dlpack(tensor)
        return self._views[key]

    def _tensor(self, rank: int, number: int, shape, dtype: torch.dtype) -> torch.Tensor:
        return self._handle.get_buffer(rank, tuple(shape), dtype, number * self.size // dtype.itemsize)

    def _allocate(self) -> None:
        """Allocate the boxes; all ranks come here in the same call."""
        if self._memory is None:
            with self.peers.answering("the allocation of memory that ranks share"):
                self._memory, self._handle = _symmetric(self.count * self.size, self.peers.group)


def _symmetric(nbytes: int, group: dist.ProcessGroup):
    """(memory of this GPU, its handle), allocated by all ranks of a group together."""
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(
        nbytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device())
    )
    return memory, _symmetric_memory.rendezvous(memory, group)


def _remove(names: list[str]) -> None:
    for name in names:
        tvm_ffi.remove_global_func(name)


_why: "weakref.WeakKeyDictionary[Peers, str]" = weakref.WeakKeyDictionary()


def why_no_mailboxes(peers: Peers) -> str:
    """Why ranks cannot write to each other's memory, "" where they can; all ranks ask together.

    They can where there are two on one host, on GPUs that reach each other.
    """
    if peers not in _why:
        _why[peers] = _reason(peers)
    return _why[peers]


def _reason(peers: Peers) -> str:
    if peers.count != 2:
        return f"there are {peers.count} ranks"
    if not torch.cuda.is_available():
        return "there is no GPU"
    said = _said_by_all(peers, socket.gethostname())
    if len(set(said)) > 1:
        return "the ranks are on two hosts"
    try:
        memory, handle = _symmetric(ALIGNMENT, peers.group)
        handle.barrier(channel=0, timeout_ms=int(peers.seconds * MILLISECONDS))
        torch.cuda.synchronize()
        own = ""
    except Exception as error:  # PyTorch's or CUDA's, where the GPUs do not reach each other
        own = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return next((reason for reason in _said_by_all(peers, own) if reason), "")


def _said_by_all(peers: Peers, value: str) -> list[str]:
    said = [""] * peers.count
    peers.collective("a question", False, lambda _: dist.all_gather_object(said, value, group=peers.group))
    return said
