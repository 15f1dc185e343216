"""Predicted time of CUDA attention kernels that walk listed blocks, from the mask's lists and the architecture.

Nothing is measured.  A multiprocessor runs some CTAs at once, each of which takes blocks one after the other.  For one
block:

    work     = its products, exponentials, copies and warps, each at its own rate, µs of a multiprocessor
    latency  = its time in a CTA that has the multiprocessor to itself: waiting, and its work undisturbed

No kernel ends before its busiest multiprocessor, its longest chain of blocks and its bytes do (shares.py):

    busy     = blocks * work + CTAs * start, of the busiest multiprocessor, + partial results / multiprocessors
    merging  = splits of the most split row * merge
    chain    = (blocks of the longest chain + fill) * latency, + merging where it has several block rows
    split    = (blocks of the longest split CTA + fill) * latency + merging
    memory   = bytes of q, k, v and the output / bandwidth                              global memory
    traffic  = elements of k and v that all blocks copy * traffic / multiprocessors     the L2 cache
    time     = launch + crowded + max(busy, max(chain, split), memory, traffic)

`crowded` is lost where CTAs leave no room for those of the next launch, which then start later.  All maxima are soft:
p-norms.

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
from tir_kernels.attention.prediction.shares import loads
from tir_kernels.cuda.device import GPU, WARP
from tir_kernels.cuda.float32.modes import mma_time
from tir_kernels.cuda.shared_tiles import MMA_ROWS
from tir_kernels.masks.block_counts import FineMask

CHAINS = 4.0  # p of the maximum of a kernel's chains: they seldom disturb each other


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of the time model, in µs but for `undisturbed`, `soft` and `fill`."""

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
    crowded: float  # of a launch beside whose CTAs the next one's do not fit


class Work(NamedTuple):
    """The work of a configuration for a problem and a mask: numbers, or arrays for many configurations."""

    blocks: float  # listed, over all heads
    part: float  # share of the blocks that are partial blocks
    active: float  # share of the blocks' rows that warps compute: they may skip rows that keep nothing
    busiest: float  # blocks of the busiest multiprocessor
    busiest_ctas: float  # its CTAs, or items that CTAs take
    chain: float  # blocks of the longest chain: those that one CTA, or one after the other in its place, takes
    links: float  # CTAs, or items, of that chain
    longest_split: float  # blocks of the longest CTA of a split row, 0 where none is split
    splits: float  # of the most split block row, 0 where none is
    partials: float  # floats of partial results
    multiprocessors: float
    warps: float  # of a CTA
    elements: float  # of a block: scores
    products: float  # of a block: scores times dimensions of q·k and of p·v, or what takes as long to multiply
    copies: float  # of a block: elements of k and v, or what takes as long to copy
    memory: float  # µs
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
        is_split, length, shares = splits > 1, counts.load / splits, splits * heads[:, None]
        blocks, part = int(heads @ counts.load.sum(axis=1)), int(heads @ counts.part)
        ctas, slots = int(shares.sum()), int(shares[is_split].sum())
        computed = int(heads @ counts.strips) * MMA_ROWS / config.block_m if g.skips_empty_rows else part
        resident = max(min(g.ctas_per_multiprocessor, gpu.ctas_that_share(g.shared_bytes)), 1)
        found = loads(length, shares, resident, gpu.multiprocessors)
        dims = g.head_dim + g.v_head_dim
        moved = sum(math.prod(problem.logical_shape(x)) for x in ("q", "k", "v", "out"))
        moved += problem.continues * math.prod(problem.logical_shape("out"))
        return Work(
            blocks=blocks,
            part=part / max(blocks, 1),
            active=1 - (part - computed) / max(blocks, 1),
            busiest=found.blocks,
            busiest_ctas=found.shares,
            chain=found.chain,
            links=found.links,
            longest_split=float(length[is_split].max(initial=0)),
            splits=float(splits[is_split].max(initial=0)),
            partials=slots * config.block_m * (g.v_head_dim + 2),
            multiprocessors=gpu.multiprocessors,
            warps=g.threads // WARP,
            elements=config.block_m * config.block_n,
            products=config.block_m * config.block_n * dims * mma_time(problem.dtype, problem.float32),
            copies=config.block_n * g.copied_elements,
            memory=moved * g.element_bytes / gpu.bandwidth,
            crowded=float(2 * ctas > resident * gpu.multiprocessors),
        )

    def after_a_part(self, blocks: float) -> "Work":
        """The same where block rows first read an earlier part's result, which takes as long as so many blocks."""
        return self._replace(
            busiest=self.busiest + blocks * self.busiest_ctas,
            chain=self.chain + blocks * self.links,
            longest_split=self.longest_split + blocks * (self.splits > 0),
        )


def predict(x: Work, c: Coefficients):
    """Predicted microseconds; the module's docstring explains the formula."""

    def soft_max(p, *values):
        return sum(value**p for value in values) ** (1 / p)

    computed = x.active * (c.product * x.products + c.element * x.elements)
    work = computed + x.part * c.part * x.elements + c.copy * x.copies + c.warp * x.warps
    latency = c.wait + c.undisturbed * work
    busy = x.busiest * work + x.busiest_ctas * c.start + x.partials * c.partial / x.multiprocessors
    merging, is_split = x.splits * c.merge, x.splits > 0
    chain = (x.chain + c.fill) * latency + (x.links > 1) * merging
    split = is_split * ((x.longest_split + c.fill) * latency + merging)
    traffic = c.traffic * x.blocks * x.copies / x.multiprocessors
    return x.factor * (
        c.launch + c.crowded * x.crowded + soft_max(c.soft, busy, soft_max(CHAINS, chain, split), x.memory, traffic)
    )
