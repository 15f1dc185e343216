"""CUDA graphs that hold a process group's collectives: they are dropped before the group ends.

NCCL ends a communicator only once no graph holds one of its kernels; until then `destroy_process_group()` waits, for
ever where an engine lives as long as the process.  torch.distributed calls `ProcessGroup.shutdown`, or `abort`, and has
no hook before it, so the class's two methods are wrapped, once an engine of ranks runs on a GPU.
"""

import functools
import weakref
from collections.abc import Callable

import torch.distributed as dist

from stof_tvm.running.cuda_program import CudaProgram

_programs: "weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[CudaProgram]]" = weakref.WeakKeyDictionary()


def end_with(group: dist.ProcessGroup, program: Callable) -> None:
    """Drop the graph of a program, if it is one that has graphs, before the group is shut down.  Raises nothing."""
    if isinstance(program, CudaProgram):
        _wrap_ends()
        _programs.setdefault(group, weakref.WeakSet()).add(program)


@functools.cache
def _wrap_ends() -> None:
    for name in ("shutdown", "abort"):
        setattr(dist.ProcessGroup, name, _after_graphs(getattr(dist.ProcessGroup, name)))


def _after_graphs(end: Callable) -> Callable:
    @functools.wraps(end)
    def ended(group: dist.ProcessGroup, *args, **kwargs):
        for program in _programs.pop(group, ()):
            program.drop_graph()
        return end(group, *args, **kwargs)

    return ended
