"""Masks that may be replaced after the build: a kernel's mask arrays are parameters of "main" instead of constants.

    o = call_tir(kernel, (q, k, v, mask0, mask1, …))        mask0: R.Tensor((n,), "int32"), a parameter of "main"

Kernels read the lengths of these arrays when they run, so arrays of any mask fit, as long as the kernel and its blocks
stay.  Whoever runs "main" passes them; `ReplaceableMask.arrays` makes them.
"""

from dataclasses import dataclass, field

import numpy as np
from tvm import relax, tirx

from relax_passes.attention.attention_site import AttentionSite
from tir_kernels.attention.mask_forms import MaskLike, compile_mask
from tir_kernels.attention.problem import AttentionProblem, BlockMap
from tir_kernels.attention.template import AttentionConfig, AttentionTemplate
from tir_kernels.masks.block_sparse import BlockSparseMask

ARRAYS = "stof.mask_arrays"  # attribute of "main": [number of its first parameter that is a mask array, how many are]


@dataclass(frozen=True)
class ReplaceableMask:
    """The kernel of one attention, which computes it with any mask.

    `site` is what the attention's whole mask is made for.  `first` and `count` say which mask arrays of "main" are its.
    """

    site: AttentionSite
    template: AttentionTemplate
    problem: AttentionProblem
    config: AttentionConfig
    first: int
    count: int

    def stored(self, mask: MaskLike | None) -> BlockSparseMask:
        """A mask in the kernel's blocks; None keeps everything.  MaskError if it does not fit or keeps nothing."""
        return compile_mask(mask, self.problem, (self.config.block_m, self.config.block_n))

    def arrays(self, stored: BlockSparseMask, target) -> list[np.ndarray]:
        """What the kernel reads of a stored mask, and its workspace as zeros, in argument order.

        Lists are int32 (entries) and int32 (entries, 2), bitmaps uint64 (blocks, tiles) or uint32 (blocks, rows, lanes,
        words); each template's `operands` explains its own.
        """
        return self.template.operands(self.problem, self.config, target, stored).arrays


@dataclass(frozen=True)
class ReplaceableMasks:
    """What a build is asked for whose masks may be replaced, and the kernels that it finds.

    Attributes
    ----------
    written_on_gpu : bool
        Whether lists are to be written on the GPU: kernels read from their arrays how much of these is in use, so that
        other lists may be written between two replays of a CUDA graph.  They have a block map in their problem.
    kernels : list of ReplaceableMask
        In the program's order.
    """

    written_on_gpu: bool = False
    kernels: list[ReplaceableMask] = field(default_factory=list)


EVERY_BLOCK = BlockMap(1, 1, 1920, 1920)  # which blocks of every kernel divide, for lists that no block map gives


def array_parameter(number: int, buffer: tirx.Buffer) -> relax.Var:
    """The parameter of "main" for a kernel's buffer; lengths that the kernel reads when it runs are symbolic."""
    shape = [
        n if isinstance(n, tirx.IntImm) else tirx.Var(f"n{number}_{dim}", "int64") for dim, n in enumerate(buffer.shape)
    ]
    return relax.Var(f"mask_array{number}", relax.TensorType(shape, buffer.dtype))
