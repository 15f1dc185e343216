"""Predicted time of the CUDA block-wise kernel, from the mask's lists and the architecture: nothing is measured.

A multiprocessor runs `resident` CTAs, each of which walks its blocks one after the other.  For one block:

    work     = its products, ldmatrix reads, exponentials and copies, each at its own rate, µs of a multiprocessor
    latency  = what it takes in a CTA that has the multiprocessor to itself: waiting, and its work undisturbed
    block    = max(work, latency / resident)                 with many CTAs work hides latency, with few it cannot

All CTAs share the multiprocessors, but none ends before its own blocks, and no kernel before the memory it touches:

    balanced = (blocks * block + CTAs * start) / multiprocessors
    longest  = blocks of the longest CTA * latency + start + splits of the most split row * merge
    memory   = bytes of q, k, v and the output / bandwidth
    time     = launch + (balanced^p + longest^p + memory^p)^(1/p)

Both maxima are soft (p-norms).  This replaces the paper's Eq. 1, which as printed says block-wise for every mask.  The
coefficients were fitted to an H200; other architectures scale with their number of multiprocessors and bandwidth, so
there only the order of configurations is meant.
"""

from dataclasses import dataclass

import numpy as np

from tir_kernels.attention.cuda_geometry import ELEMENT_BYTES, MMA_ROWS, BlockWiseConfig, Geometry
from tir_kernels.attention.cuda_work import split_counts
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.block_sparse_mask import BlockSparseMask

# (block_m, block_n, warps), each the fastest somewhere on an H200.  More means compiling masks at more block sizes.
TILES = ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 32, 4))


@dataclass(frozen=True)
class Architecture:
    """Multiprocessors, shared memory and 32-bit registers of each, and memory bandwidth in bytes a µs."""

    multiprocessors: int
    shared_bytes: int
    bandwidth: float


ARCHITECTURES = {
    "80": Architecture(108, 164 << 10, 1.55e6),  # A100
    "86": Architecture(84, 100 << 10, 0.75e6),  # A10, RTX 3090
    "89": Architecture(142, 100 << 10, 0.86e6),  # L40S
    "90": Architecture(132, 228 << 10, 4.3e6),  # H200
}


@dataclass(frozen=True)
class Coefficients:
    """µs.  See the module's description; `part` is added to a part block's work for each element."""

    launch: float
    start: float
    merge: float
    wait: float  # latency of a block besides its work
    undisturbed: float  # time of its work in a lone CTA over that on a busy multiprocessor
    block: float  # work of any block
    product: float  # for each element of head a score or output needs
    read: float  # for each element that a warp reads from shared memory
    copy: float  # for each element of k and v
    element: float  # for each score
    part: float
    soft: float  # p


# To 516 times of five tiles at 108 points of an H200 (batch 1 to 16, 128 to 8192 tokens, heads of 64 and 128, causal,
# window, Longformer, BigBird, strided and document masks).  Fitted to half of the points, the choice is 1.7 % slower
# than the best tile on the other half in the geometric mean, 20 % at worst (halves exchanged: 2.4 %, 43 %); one tile
# for each head size is 5.8 % and 26 % slower.  Predictions are 9 % off (root mean square).
FITTED = Coefficients(
    launch=1.42,
    start=1.59,
    merge=0.528,
    wait=0.133,
    undisturbed=0.822,
    block=0.0469,
    product=5.51e-7,
    read=9.16e-8,
    copy=5.18e-6,
    element=1.4e-5,
    part=1.06e-5,
    soft=2.08,
)


# Of the row-wise kernel: launch, first loads and merge, and the share of the memory's bandwidth that it reaches.
ROW_WISE_START_US = 6.0
REACHED_BANDWIDTH = 0.9


def shortlist(configs: list[BlockWiseConfig]) -> list[BlockWiseConfig]:
    """The configurations worth predicting, of those that fit: two stages of the usual tiles, else the default."""
    return [c for c in configs if c.stages == 2 and (c.block_m, c.block_n, c.warps) in TILES] or configs[:1]


def predict_us(problem: AttentionProblem, config: BlockWiseConfig, mask: BlockSparseMask, arch: str, c=FITTED) -> float:
    """Predicted microseconds of the kernel for a mask compiled at (block_m, block_n) of the configuration."""
    device = ARCHITECTURES.get(arch.removeprefix("sm_").rstrip("af"), ARCHITECTURES["90"])
    return Model(problem, config, mask, device).us(c)


def predict_row_wise_us(problem: AttentionProblem, mask: BlockSparseMask, arch: str) -> float:
    """Predicted microseconds of the row-wise kernel: its start, and keys and values of listed blocks read once."""
    device = ARCHITECTURES.get(arch.removeprefix("sm_").rstrip("af"), ARCHITECTURES["90"])
    tokens = mask.block_density * problem.kv_len * problem.batch * problem.kv_heads
    bytes_read = tokens * (problem.head_dim + problem.v_head_dim) * ELEMENT_BYTES
    return ROW_WISE_START_US + bytes_read / (REACHED_BANDWIDTH * device.bandwidth)


class Model:
    """The quantities that the prediction needs, apart from the coefficients: counted once."""

    def __init__(self, problem, config, mask, device):
        g = Geometry(problem, config)
        patterns = mask.head_map(problem.batch, problem.q_heads).reshape(-1)
        length = np.diff(mask.load_row_ptr).reshape(mask.n_patterns, -1)[patterns]
        part = np.diff(mask.part_row_ptr[:: mask.n_block_rows])[patterns]
        splits = split_counts(length, config.block_m, config.block_n)
        self.blocks, self.parts, self.ctas = int(length.sum()), int(part.sum()), int(splits.sum())
        self.longest = float((length / splits).max())
        self.most_splits = int(splits.max())
        self.multiprocessors = device.multiprocessors
        fits = min(g.min_blocks_per_sm, device.shared_bytes // (g.shared_bytes + 1024))
        self.resident = max(1.0, min(fits, self.ctas / device.multiprocessors))
        dims = g.head_dim + g.v_head_dim
        # The share of the products that warps compute: rows of a part block that keep nothing may be left out.
        self.active = 1.0
        if g.skips_empty_rows and len(mask.bitmap):
            strips = mask.bitmap.reshape(len(mask.bitmap), -1, config.block_m // MMA_ROWS, 2).any(axis=(1, 3))
            computed = np.append(0, np.cumsum(strips.mean(axis=1)))[mask.part_row_ptr[:: mask.n_block_rows]]
            self.active = 1 - (self.parts - float(np.diff(computed)[patterns].sum())) / self.blocks
        self.elements = config.block_m * config.block_n
        self.products = self.elements * dims
        self.reads = config.warps * config.block_n * dims
        self.copies = config.block_n * dims
        shapes = (problem.logical_shape(x) for x in ("q", "k", "v", "out"))
        moved = sum(int(np.prod(s, dtype=np.int64)) for s in shapes)
        moved += problem.continues * int(np.prod(problem.shape("out"), dtype=np.int64))
        self.memory = moved * ELEMENT_BYTES / device.bandwidth

    def us(self, c: Coefficients) -> float:
        part = c.part * self.elements * self.parts / max(self.blocks, 1)
        products = c.product * self.products + c.read * self.reads + c.element * self.elements
        work = c.block + c.copy * self.copies + self.active * products + part
        latency = c.wait + c.undisturbed * work
        block = (work**c.soft + (latency / self.resident) ** c.soft) ** (1 / c.soft)
        balanced = (self.blocks * block + self.ctas * c.start / self.resident) / self.multiprocessors
        longest = self.longest * latency + c.start + (self.most_splits > 1) * self.most_splits * c.merge
        return c.launch + (balanced**c.soft + longest**c.soft + self.memory**c.soft) ** (1 / c.soft)
