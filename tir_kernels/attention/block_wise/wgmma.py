"""Device code of the CUDA block-wise kernel that multiplies by wgmma (sm_90a).

Four warps execute one instruction together, on 64 rows.  Probabilities are operands in registers, in the same fragments
as for mma.sync.  Queries, keys and values are read from shared memory through descriptors.  Accumulators have the
layout of mma.sync, so all other device code is shared.
Queries in registers would save reads of shared memory, but ptxas (CUDA 13.0) assigns the registers of an operand that
does not change in the loop to the probabilities of the same size.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.geometry import AttentionGeometry
from tir_kernels.cuda.ptx import SHORT
from tir_kernels.cuda.wgmma import PIN_FLOAT, PIN_WORD, descriptor

STEP = 16  # depth of one instruction


def warpgroup_products(g: AttentionGeometry):
    """The functions of `products.matrix_products` for a warpgroup; keys and values are addressed by their tiles."""
    score_tiles, value_tiles, query_steps = g.score_tiles, g.value_tiles, g.query_steps
    dtype = SHORT[g.problem.dtype]
    pack_instruction = f"cvt.rn.{dtype}x2.f32"
    product_qk, product_pv = (
        f"wgmma.mma_async.sync.aligned.m64n{8 * tiles}k{STEP}.f32.{dtype}.{dtype}"
        for tiles in (score_tiles, value_tiles)
    )

    def q_address(start, warp, lane):
        return start + warp // 4 * (64 * g.q_tile.pitch)

    def tile_address(start, lane):
        return start

    @T.inline
    def pin(registers, n, function, source):
        """Keep the compiler from moving a use of the registers across this point, for example across a wait."""
        for i in T.unroll(n):
            T.cuda.func_call(function, registers[i], source_code=source)

    @T.inline
    def finish():
        T.ptx["wgmma.commit_group.sync.aligned"]()
        T.ptx["wgmma.wait_group.sync.aligned"](0)

    @T.inline
    def start_qk(s, q_address, k_address):
        """Start s = q kᵀ; s holds (score_tiles, 4)."""
        T.ptx["wgmma.fence.sync.aligned"]()
        for step in T.unroll(query_steps):
            T.ptx[product_qk](
                *[s[i] for i in range(4 * score_tiles)],
                descriptor(g.q_tile, q_address + g.q_tile.offset(0, 2 * step)),
                descriptor(g.k_tile, k_address + g.k_tile.offset(0, 2 * step)),
                T.bool(step > 0), 1, 1, 0, 0,
            )  # fmt: skip

    @T.inline
    def pack(p, s):
        """p = s rounded to the inputs' dtype, as fragments."""
        for i in T.unroll(2 * score_tiles):
            T.ptx[pack_instruction](p[i], s[2 * i + 1], s[2 * i])

    @T.inline
    def start_pv(o, p, v_address):
        """Start o += p v; o holds (value_tiles, 4)."""
        pin(p, 2 * score_tiles, *PIN_WORD)
        pin(o, 4 * value_tiles, *PIN_FLOAT)
        T.ptx["wgmma.fence.sync.aligned"]()
        for step in T.unroll(score_tiles // 2):
            T.ptx[product_pv](
                *[o[i] for i in range(4 * value_tiles)],
                p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                descriptor(g.v_tile, v_address + step * (STEP * g.v_tile.pitch)),
                T.bool(True), 1, 1, 1,
            )  # fmt: skip

    @T.inline
    def multiply_qk(s, q, q_address, k_address):
        """s = q kᵀ; `q` is not used."""
        start_qk(s, q_address, k_address)
        finish()
        pin(s, 4 * score_tiles, *PIN_FLOAT)

    @T.inline
    def multiply_pv(o, s, v_address):
        """o += p v, with p = s rounded to the inputs' dtype."""
        p = T.alloc_local([2 * score_tiles], "uint32")
        pack(p, s)
        start_pv(o, p, v_address)
        finish()
        pin(o, 4 * value_tiles, *PIN_FLOAT)

    return SimpleNamespace(
        q_address=q_address,
        k_address=tile_address,
        v_address=tile_address,
        pin=pin,
        start_qk=start_qk,
        pack=pack,
        start_pv=start_pv,
        multiply_qk=multiply_qk,
        multiply_pv=multiply_pv,
    )
