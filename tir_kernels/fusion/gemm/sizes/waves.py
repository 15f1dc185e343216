"""Tiles of two widths for one product: wide ones in whole waves, narrower ones for the rows that are left.

A grid of as many CTAs as run at once takes the tiles of a product in turn.  If the last turn has tiles for some CTAs
only, the others idle for as long as a tile takes: 9,712 rows by 768 columns are 228 tiles of 128 × 256, two turns of
132 CTAs for the work of 1.73.  With `GemmConfig.tail_n`, the wide tiles cover as many rows as fill whole turns, and
the rest has tiles of `tail_n` columns, which divide it among all CTAs: there, one turn of 132 wide tiles and one of 128
tiles of 128 × 192.  No tile is cut along k, so no partial sums are written.
"""

from dataclasses import dataclass, replace

from tir_kernels.cuda.device import GPU
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, legal

LEAST_BLOCKS = 5  # of k: stores bind what is shallower, and sets of warps that take turns hide them better


@dataclass(frozen=True)
class Part:
    """`strips` of block_m rows from strip `first` on, all of whose tiles have the shape of `g`."""

    g: GemmGeometry
    first: int
    strips: int

    @property
    def tiles(self) -> int:
        return self.strips * self.g.n_tiles


def slots_of(g: GemmGeometry, gpu: GPU) -> int:
    """CTAs that run at once on a GPU."""
    return g.ctas_per_multiprocessor * gpu.multiprocessors


def parts(g: GemmGeometry, slots: int) -> tuple[Part, ...]:
    """The parts of a product on a grid of `slots` CTAs: one, or wide tiles and narrower ones after them."""
    if g.tail is not None:
        strips = g.m_tiles * g.n_tiles // slots * slots // g.n_tiles
        if 0 < strips < g.m_tiles:
            return Part(g, 0, strips), Part(g.tail, strips, g.m_tiles - strips)
    return (Part(g, 0, g.m_tiles),)


def tail_turns(head: Part, tail: Part, slots: int) -> int:
    """Turns in which CTAs take narrower tiles; CTAs without a wide tile in its last turn begin with them there."""
    return -(-(head.tiles + tail.tiles) // slots) - -(-head.tiles // slots)


def may_have_tail(g: GemmGeometry, tail_n: int, gpu: GPU, shared_limit: int) -> bool:
    """Whether tiles of `tail_n` columns after whole waves of `g`'s are possible and divide the rest otherwise."""
    with_tail = GemmGeometry(g.problem, replace(g.config, tail_n=tail_n))
    if g.k_blocks < LEAST_BLOCKS or not legal(with_tail, shared_limit):
        return False
    return len(parts(with_tail, slots_of(g, gpu))) == 2
