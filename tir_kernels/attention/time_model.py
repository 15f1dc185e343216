"""Predicted time of CUDA attention kernels that walk listed blocks, from the mask's lists and the architecture.

Nothing is measured.  A multiprocessor runs `resident` CTAs, each of which takes blocks one after the other.  For one
block:

    work     = its products, exponentials, copies and warps, each at its own rate, µs of a multiprocessor
    latency  = its time in a CTA that has the multiprocessor to itself: waiting, and its work undisturbed
    block    = max(work, latency / resident)                 with many CTAs work hides latency, with few it cannot

All CTAs share the multiprocessors.  No CTA ends before its own blocks, and no kernel before its bytes have moved:

    balanced = (blocks * block + CTAs * start / resident + partial results) / multiprocessors
    longest  = (blocks of the longest CTA + fill) * latency + start + splits of the most split row * merge
    memory   = bytes of q, k, v and the output / bandwidth                              global memory
    traffic  = elements of k and v that all blocks copy * traffic / multiprocessors     the L2 cache
    time     = launch + crowded + max(balanced + idle, longest, memory, traffic)

`idle` is the time in which CTAs that find no more block rows wait for the others' last ones.  `crowded` is lost where
CTAs leave no room for those of the next launch, which then start later.  All maxima are soft: p-norms.

docs/attention_model.md explains the terms, how they were fitted and how good they are.  The coefficients are an H200's;
other architectures scale with their number of multiprocessors and bandwidth, so there only the order of configurations
counts.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tir_kernels.attention.block_wise.work import split_counts
from tir_kernels.attention.geometry import AttentionGeometry
from tir_kernels.cuda.device import GPU, WARP
from tir_kernels.cuda.float32.modes import mma_time
from tir_kernels.cuda.shared_tiles import MMA_ROWS
from tir_kernels.masks.block_counts import FineMask


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of the time model, in µs but for `undisturbed`, `soft`, `fill` and `idle`."""

    launch: float
    start: float  # of a CTA: its query rows, its first blocks, its output
    merge: float  # of one of a row's splits
    fill: float  # blocks that take as long as the first one does in addition: nothing runs beside it
    partial: float  # for each float of a partial result, written and read
    wait: float  # latency of a block besides its work
    undisturbed: float  # time of its work in a lone CTA over that on a busy multiprocessor
    product: float  # for each multiply-add of QKᵀ and PV
    element: float  # for each score
    part: float  # for each score of a partial block, in addition to `element`
    copy: float  # for each element of k and v
    traffic: float  # for each element of k and v that passes through the multiprocessor's share of the L2 cache
    warp: float  # for each warp: what it issues for a block of any size
    soft: float  # p
    idle: float  # share of the idle time that is lost
    crowded: float  # of a launch beside whose CTAs the next one's do not fit


class Work(NamedTuple):
    """The work of a configuration for a problem and a mask: numbers, or arrays for many configurations."""

    blocks: float  # listed, over all heads
    part: float  # share of the blocks that are partial blocks
    active: float  # share of the blocks' rows that warps compute: they may skip rows that keep nothing
    ctas: float
    longest: float  # blocks of the longest CTA
    splits: float  # of the most split block row, 0 where none is
    partials: float  # floats of partial results
    resident: float  # CTAs that share a multiprocessor
    multiprocessors: float
    warps: float  # of a CTA
    elements: float  # of a block: scores
    products: float  # of a block: scores times dimensions of q·k and of p·v, or what takes as long to multiply
    copies: float  # of a block: elements of k and v, or what takes as long to copy
    memory: float  # µs
    idle: float  # blocks for which a CTA that finds no more work waits for the others, at least
    crowded: float = 0.0  # 1 where two launches' CTAs do not fit at once
    factor: float = 1.0  # of the predicted time: what the formula leaves out of a configuration

    @staticmethod
    def of(g: AttentionGeometry, fine: FineMask, gpu: GPU, at_once: int) -> "Work":
        """The numbers of one configuration for a problem, which `g` has.

        `fine` is the mask with its tokens in the configuration's order; `gpu` decides how many CTAs share a
        multiprocessor, and the µs of memory; long block rows are split among `at_once` CTAs.
        """
        problem, config = g.problem, g.config
        counts = fine.counts(config.block_m, config.block_n, g.leading_rows)
        patterns = fine.mask.head_map(problem.batch, problem.q_heads).reshape(-1)
        heads = np.bincount(patterns, minlength=len(counts.load))  # heads that share each pattern
        splits = split_counts(counts.load, config.block_n, at_once, heads)
        blocks, part = int(heads @ counts.load.sum(axis=1)), int(heads @ counts.part)
        ctas, slots = (int(heads @ x.sum(axis=1)) for x in (splits, np.where(splits > 1, splits, 0)))
        computed = int(heads @ counts.strips) * MMA_ROWS / config.block_m if g.skips_empty_rows else part
        fits = min(g.ctas_per_multiprocessor, gpu.ctas_that_share(g.shared_bytes))
        dims = g.head_dim + g.v_head_dim
        places = max(fits, 1) * gpu.multiprocessors
        waves = ctas / places
        shortest = float((counts.load / splits).min())
        moved = sum(math.prod(problem.logical_shape(x)) for x in ("q", "k", "v", "out"))
        moved += problem.continues * math.prod(problem.logical_shape("out"))
        return Work(
            blocks=blocks,
            part=part / max(blocks, 1),
            active=1 - (part - computed) / max(blocks, 1),
            ctas=ctas,
            longest=float((counts.load / splits).max()),
            splits=float(splits.max()) if slots else 0.0,
            partials=slots * config.block_m * (g.v_head_dim + 2),
            resident=max(1.0, min(fits, ctas / gpu.multiprocessors)),
            multiprocessors=gpu.multiprocessors,
            warps=g.threads // WARP,
            elements=config.block_m * config.block_n,
            products=config.block_m * config.block_n * dims * mma_time(problem.dtype, problem.float32),
            copies=config.block_n * g.copied_elements,
            memory=moved * g.element_bytes / gpu.bandwidth,
            idle=(math.ceil(waves) - waves) * shortest if waves > 1 else 0.0,
            crowded=float(2 * ctas > places),
        )


def predict(x: Work, c: Coefficients):
    """Predicted microseconds; the module's docstring explains the formula."""

    def soft_max(*values):
        return sum(value**c.soft for value in values) ** (1 / c.soft)

    computed = x.active * (c.product * x.products + c.element * x.elements)
    work = computed + x.part * c.part * x.elements + c.copy * x.copies + c.warp * x.warps
    latency = c.wait + c.undisturbed * work
    block = soft_max(work, latency / x.resident)
    balanced = (x.blocks * block + x.ctas * c.start / x.resident + x.partials * c.partial) / x.multiprocessors
    idle = c.idle * x.idle * block * x.resident
    longest = (x.longest + c.fill) * latency + c.start + x.splits * c.merge
    traffic = c.traffic * x.blocks * x.copies / x.multiprocessors
    return x.factor * (c.launch + c.crowded * x.crowded + soft_max(balanced + idle, longest, x.memory, traffic))
