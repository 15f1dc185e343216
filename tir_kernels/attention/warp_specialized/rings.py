"""How the roles of the warp-specialized kernel hand tiles over: rings of stages in shared memory, and their barriers.

There is a ring of K tiles with their keep bits, one of V tiles, and one of queries with the fields of their item.  A
stage has two barriers: the first completes when its tile has arrived, the second when every warp that computes has read
it.  Tile c of a ring, counted from 0 over all items of a CTA, is in stage c % stages; its turn has the parity
(c / stages) % 2.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.warp_specialized.geometry import BARRIER_BYTES, Geometry
from tir_kernels.cuda.ptx import address

ARRIVED, READ = 0, 1  # the barriers of a stage


class Ring:
    """The stages of one operand, whose barriers lie at `offset` from the start of shared memory."""

    def __init__(self, stages: int, offset: int):
        self.stages, self.offset = stages, offset

    def stage(self, c):
        """The stage of tile c."""
        return c % self.stages

    def barrier(self, base, side: int, stage):
        """Address of a stage's barrier."""
        return address(base + (self.offset + side * self.stages * BARRIER_BYTES) + stage * BARRIER_BYTES)

    def arrived(self, base, c):
        """Address of the barrier at which tile c arrives."""
        return self.barrier(base, ARRIVED, self.stage(c))

    def turn(self, c):
        """Parity of the phase in which tile c arrives."""
        return c // self.stages % 2


def rings_of(g: Geometry) -> SimpleNamespace:
    """The rings `k`, `v` and `q`."""
    stages, size = g.config.stages, 2 * g.config.stages * BARRIER_BYTES
    return SimpleNamespace(
        k=Ring(stages, g.barrier_offset),
        v=Ring(stages, g.barrier_offset + size),
        q=Ring(g.q_stages, g.barrier_offset + 2 * size),
    )


def ring_functions(g: Geometry, rings):
    """`initialize` for the CTA; `await_read` for the thread that copies; `await_arrived`, `release` for the others."""
    warps = g.threads // 32

    @T.inline
    def initialize_ring(ring, base):
        for i in T.unroll(ring.stages):
            T.ptx["mbarrier.init.shared::cta.b64"](ring.barrier(base, ARRIVED, i), T.uint32(1))
            T.ptx["mbarrier.init.shared::cta.b64"](ring.barrier(base, READ, i), T.uint32(warps))

    @T.inline
    def initialize(base, thread):
        if thread == 0:
            initialize_ring(rings.k, base)
            initialize_ring(rings.v, base)
            initialize_ring(rings.q, base)
            T.ptx["fence.proxy.async.shared::cta"]()
        T.cuda.cta_sync()

    @T.inline
    def await_read(ring, base, c):
        """Wait until the tile before c in its stage has been read."""
        T.cuda.mbarrier_wait(ring.barrier(base, READ, ring.stage(c)), ring.turn(c) ^ 1)

    @T.inline
    def await_arrived(ring, base, c):
        T.cuda.mbarrier_wait(ring.arrived(base, c), ring.turn(c))

    @T.inline
    def release(ring, base, c, lane):
        """Count this warp among those that have read tile c."""
        if lane == 0:
            T.ptx["mbarrier.arrive.shared::cta.b64"](ring.barrier(base, READ, ring.stage(c)), T.uint32(1))

    return SimpleNamespace(initialize=initialize, await_read=await_read, await_arrived=await_arrived, release=release)
