"""Device code of the CUDA attention kernels that multiplies float32 by mma.sync (cuda/float32/fragments.py).

Queries and keys lie in shared memory as 16-bit ones do, with half as many elements in a chunk: ldmatrix then gives
fragments of m16n8k8.  Values are read a word at a time.  A lane's probabilities are of the keys 2 l and 2 l + 1 of
eight; they stand for k = l and k = l + 4 of the product with the values, whose rows are read in the same order.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.block_wise.geometry import Geometry
from tir_kernels.cuda.float32.fragments import fragment_products, in_turn
from tir_kernels.cuda.ptx import LDMATRIX, address
from tir_kernels.cuda.shared_tiles import WordTile


def float32_products(g: Geometry, addresses: SimpleNamespace):
    """The functions of `products.matrix_products`; `addresses` has those of its q_address and k_address."""
    row_tiles, score_tiles, value_tiles, query_steps = g.row_tiles, g.score_tiles, g.value_tiles, g.query_steps
    parts = fragment_products(g.problem.float32)
    wait = in_turn(g.problem.float32, row_tiles, value_tiles)
    # If nothing but addresses depends on the step, a loop saves registers: ptxas would work on many steps at once.
    all_steps = T.unroll if g.q_in_registers else lambda steps: T.serial(steps, unroll=False)
    v_tile = g.v_tile
    assert isinstance(v_tile, WordTile)

    def v_address(start, lane):
        """Address of the value that this lane reads for the first of its two keys, in the first n8 tile."""
        return start + v_tile.word(lane % 4 * 2, lane // 4)

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
        q_parts = T.alloc_local([row_tiles * parts.a_size], "uint32")
        k_parts = T.alloc_local([parts.b_size], "uint32")
        for i in T.unroll(row_tiles * score_tiles * 4):
            s[i] = T.float32(0)
        for step in all_steps(query_steps):
            for tile in T.unroll(row_tiles):
                if not g.q_in_registers:
                    load_q(q, tile * 4, q_address, tile, step)
                qi = T.meta_var((tile * query_steps + step) * 4 if g.q_in_registers else tile * 4)
                parts.prepare_a(q_parts, tile * parts.a_size, lambda i: T.reinterpret("float32", q[qi + i]))
            for n in T.unroll(score_tiles // 2):
                T.ptx[LDMATRIX](
                    k[0], k[1], k[2], k[3], address(g.k_tile.step(k_address, 2 * step) + n * 16 * g.k_tile.pitch)
                )
                for half in T.unroll(2):
                    parts.prepare_b(k_parts, 0, lambda i: T.reinterpret("float32", k[2 * half + i]))
                    for tile in T.unroll(row_tiles):
                        si = T.meta_var((tile * score_tiles + 2 * n + half) * 4)
                        parts.multiply(s, si, q_parts, tile * parts.a_size, k_parts, 0)

    @T.inline
    def multiply_pv(o, s, v_address):
        """o += s v; o holds (row_tiles, value_tiles, 4)."""
        p_parts = T.alloc_local([row_tiles * parts.a_size], "uint32")
        v = T.alloc_local([2], "float32")
        v_parts = T.alloc_local([parts.b_size], "uint32")
        below = v_tile.beside(v_address, 1)
        for step in T.unroll(score_tiles):
            for tile in T.unroll(row_tiles):
                # Accumulators are (row, 2 l), (row, 2 l + 1), (row + 8, 2 l), …; a fragment has both rows first.
                si = T.meta_var((tile * score_tiles + step) * 4)
                parts.prepare_a(p_parts, tile * parts.a_size, lambda i: s[si + i % 2 * 2 + i // 2])
            for n in T.unroll(value_tiles):
                down = T.meta_var(step * 8 * v_tile.pitch + wait(o, n, v_address))
                T.ptx["ld.shared.f32"](v[0], address(v_tile.step(v_address, 2 * n) + down))
                T.ptx["ld.shared.f32"](v[1], address(v_tile.step(below, 2 * n) + down))
                parts.prepare_b(v_parts, 0, lambda i: v[i])
                for tile in T.unroll(row_tiles):
                    oi = T.meta_var((tile * value_tiles + n) * 4)
                    parts.multiply(o, oi, p_parts, tile * parts.a_size, v_parts, 0)

    return SimpleNamespace(
        q_address=addresses.q_address,
        k_address=addresses.k_address,
        v_address=v_address,
        load_all_q=load_all_q,
        multiply_qk=multiply_qk,
        multiply_pv=multiply_pv,
    )
