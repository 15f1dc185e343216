"""Device code of the CUDA attention kernels that multiplies 16-bit elements by mma.sync and stores the output.

The functions are inlined into a kernel while it is parsed.  Loops over compile-time extents are unrolled, so fragments
stay in registers.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.block_wise.float32 import float32_products
from tir_kernels.attention.block_wise.geometry import Geometry
from tir_kernels.attention.geometry import AttentionGeometry
from tir_kernels.cuda.ptx import LDMATRIX, LDMATRIX_TRANS, SHORT, address
from tir_kernels.cuda.shared_tiles import CHUNK_BYTES, SharedTile


def operand_addresses(g: Geometry):
    """The addresses of the rows that a lane gives to ldmatrix: `q_address`, `k_address` and `v_address`."""

    def a_address(tile: SharedTile, start, first_row, lane):
        """For a 16×16 operand A, or for a transposed B (v)."""
        return start + tile.offset(first_row + lane % 16, lane // 16)

    def b_address(tile: SharedTile, start, lane):
        """For two n8 tiles of B, whose rows lie along n (k)."""
        return start + tile.offset(lane // 16 * 8 + lane % 8, lane // 8 % 2)

    return SimpleNamespace(
        q_address=lambda start, warp, lane: a_address(g.q_tile, start, warp * (16 * g.row_tiles), lane),
        k_address=lambda start, lane: b_address(g.k_tile, start, lane),
        v_address=lambda start, lane: a_address(g.v_tile, start, 0, lane),
    )


def matrix_products(g: Geometry):
    """`load_q`, `multiply_qk` and `multiply_pv` of one warp, and the lane addresses that they start from.

    The products are of 16-bit elements, or of float32 (float32_products.py).
    """
    if g.problem.dtype == "float32":
        return float32_products(g, operand_addresses(g))
    row_tiles, score_tiles, value_tiles, query_steps = g.row_tiles, g.score_tiles, g.value_tiles, g.query_steps
    at = operand_addresses(g)
    mma_instruction = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32".format(SHORT[g.problem.dtype])
    pack_instruction = f"cvt.rn.{SHORT[g.problem.dtype]}x2.f32"

    @T.inline
    def mma(c, ci, a, ai, b, bi):
        T.ptx[mma_instruction](
            c[ci], c[ci + 1], c[ci + 2], c[ci + 3],
            a[ai], a[ai + 1], a[ai + 2], a[ai + 3], b[bi], b[bi + 1],
            c[ci], c[ci + 1], c[ci + 2], c[ci + 3],
        )  # fmt: skip

    @T.inline
    def load_q(q, i, q_address, tile, step):
        row_address = T.meta_var(g.q_tile.step(q_address, 2 * step) + tile * 16 * g.q_tile.pitch)
        T.ptx[LDMATRIX](q[i], q[i + 1], q[i + 2], q[i + 3], address(row_address))

    @T.inline
    def load_all_q(q, q_address):
        for tile in T.unroll(row_tiles):
            for step in T.unroll(query_steps):
                load_q(q, (tile * query_steps + step) * 4, q_address, tile, step)

    @T.inline
    def multiply_qk(s, q, q_address, k_address):
        """s = q kᵀ; s holds (row_tiles, score_tiles, 4), q's fragments (row_tiles, query_steps, 4) words."""
        k = T.alloc_local([4], "uint32")
        for i in T.unroll(row_tiles * score_tiles * 4):
            s[i] = T.float32(0)
        for step in T.unroll(query_steps):
            if not g.q_in_registers:
                for tile in T.unroll(row_tiles):
                    load_q(q, tile * 4, q_address, tile, step)
            for n in T.unroll(score_tiles // 2):
                T.ptx[LDMATRIX](
                    k[0], k[1], k[2], k[3], address(g.k_tile.step(k_address, 2 * step) + n * 16 * g.k_tile.pitch)
                )
                for tile in T.unroll(row_tiles):
                    qi = T.meta_var((tile * query_steps + step) * 4 if g.q_in_registers else tile * 4)
                    mma(s, (tile * score_tiles + 2 * n) * 4, q, qi, k, 0)
                    mma(s, (tile * score_tiles + 2 * n + 1) * 4, q, qi, k, 2)

    @T.inline
    def multiply_pv(o, s, v_address):
        """o += p v, with p = s rounded to the inputs' dtype; o holds (row_tiles, value_tiles, 4)."""
        p = T.alloc_local([row_tiles * 4], "uint32")
        v = T.alloc_local([4], "uint32")
        for step in T.unroll(score_tiles // 2):
            for tile in T.unroll(row_tiles):
                for i in T.unroll(4):
                    si = T.meta_var((tile * score_tiles + 2 * step) * 4 + 2 * i)
                    T.ptx[pack_instruction](p[tile * 4 + i], s[si + 1], s[si])
            for n in T.unroll(value_tiles // 2):
                T.ptx[LDMATRIX_TRANS](
                    v[0], v[1], v[2], v[3], address(g.v_tile.step(v_address, 2 * n) + step * 16 * g.v_tile.pitch)
                )
                for tile in T.unroll(row_tiles):
                    mma(o, (tile * value_tiles + 2 * n) * 4, p, tile * 4, v, 0)
                    mma(o, (tile * value_tiles + 2 * n + 1) * 4, p, tile * 4, v, 2)

    return SimpleNamespace(
        q_address=at.q_address,
        k_address=at.k_address,
        v_address=at.v_address,
        load_all_q=load_all_q,
        multiply_qk=multiply_qk,
        multiply_pv=multiply_pv,
    )


def output_store(g: AttentionGeometry):
    """`store(o, warp_base, lane, pointer, first_row)`: one warp's rows of o to global memory, 16 bytes a lane.

    In the output these are rows first_row, first_row + token_stride, ….  They pass through the warp's own part of
    shared memory, so the warp waits for no other.
    """
    tile, row_tiles, value_tiles = g.out_tile, g.row_tiles, g.value_tiles
    is_float32 = g.problem.dtype == "float32"
    pack_instruction = "" if is_float32 else f"cvt.rn.{SHORT[g.problem.dtype]}x2.f32"
    real_chunks = g.problem.v_head_dim // tile.chunk

    @T.inline
    def stage(o, oi, word, warp_base, row, n, lane):
        """Write a lane's two neighbours in row `row` of n8 tile n."""
        if is_float32:
            place = T.meta_var(tile.offset(row, 2 * n + lane % 4 // 2) + lane % 2 * 8)
            T.ptx["st.shared.v2.f32"](address(warp_base + place), o[oi], o[oi + 1])
        else:
            T.ptx[pack_instruction](word[0], o[oi + 1], o[oi])
            T.ptx["st.shared.b32"](address(warp_base + tile.offset(row, n) + lane % 4 * 4), word[0])

    @T.inline
    def store(o, warp_base, lane, pointer, first_row):
        word = T.alloc_local([4], "uint32")
        T.cuda.warp_sync()
        for m in T.unroll(row_tiles):
            for n in T.unroll(value_tiles):
                for r in T.unroll(2):
                    oi = T.meta_var((m * value_tiles + n) * 4 + 2 * r)
                    stage(o, oi, word, warp_base, m * 16 + r * 8 + lane // 4, n, lane)
        T.cuda.warp_sync()
        row = T.meta_var(lane // tile.threads_per_row)
        chunk = T.meta_var(lane % tile.threads_per_row)
        base = warp_base + tile.offset(row, chunk)
        for i in T.unroll(tile.passes):
            target = T.meta_var(first_row + (row + i * tile.rows_per_pass) * g.config.token_stride)
            for part in T.unroll(tile.parts):
                at = T.meta_var(chunk + part * tile.threads_per_row)
                if T.And(at < real_chunks, g.has_row(target)):
                    T.ptx["ld.shared.v4.b32"](
                        word[0], word[1], word[2], word[3],
                        address(tile.pass_offset(base, i) + part * (tile.threads_per_row * CHUNK_BYTES)),
                    )  # fmt: skip
                    T.ptx["st.global.v4.b32"](pointer(target, at * tile.chunk), word[0], word[1], word[2], word[3])

    return store
