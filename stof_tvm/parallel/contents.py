"""Checksums of what all ranks must be given alike: tensors, example inputs, and programs."""

import re
import zlib
from collections.abc import Iterable

import torch
from torch.utils import _pytree as pytree

SAMPLE = 4096  # elements of each tensor, from all over it, that the ranks compare
# The number of a GPU, which is each rank's own, and where an object is in memory.
_OWN = re.compile(r", index=\d+|(?<=cuda):\d+|0x[0-9a-f]+")


def checksum_of(values: Iterable) -> int:
    """A checksum of samples of tensors, of any shapes and dtypes, and of how other values are written."""
    checksum = 0
    for x in values:
        if not isinstance(x, torch.Tensor):
            checksum = zlib.crc32(repr(x).encode(), checksum)
            continue
        checksum = zlib.crc32(repr((x.shape, x.dtype)).encode(), checksum)
        if not x.is_meta and not isinstance(x, torch._subclasses.FakeTensor):
            sample = x.detach().flatten()[:: max(1, x.numel() // SAMPLE)].cpu().contiguous()
            checksum = zlib.crc32(sample.view(torch.uint8).numpy().data, checksum)
    return checksum


def contents_of(program: torch.export.ExportedProgram, weights: Iterable[torch.Tensor], call: tuple) -> dict[str, int]:
    """Checksums of an exported program, its tensors and its example inputs (args, kwargs), by what they are."""
    return {
        "program": _checksum_of_program(program.graph_module),
        "content of its weights": checksum_of(weights),
        "content of its example inputs": checksum_of(pytree.tree_leaves(call)),
    }


def _checksum_of_program(module: torch.fx.GraphModule) -> int:
    """A checksum of all operators and their arguments, but for the GPU that they run on."""
    checksum = 0
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                target = getattr(node.target, "__name__", str(node.target))
                line = repr((node.op, str(target), node.args, node.kwargs))
                checksum = zlib.crc32(_OWN.sub("", line).encode(), checksum)
    return checksum
