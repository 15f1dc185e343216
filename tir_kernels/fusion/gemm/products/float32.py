"""Device code of the CUDA matrix-product kernels that loads and multiplies fragments of float32.

A row of k lies in shared memory as a row of 16-bit elements does, with half as many elements in a chunk: ldmatrix then
gives fragments of m16n8k8.  A weight whose rows lie along n is read a word at a time.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.cuda.float32.fragments import fragment_products, in_turn
from tir_kernels.cuda.ptx import LDMATRIX, address
from tir_kernels.cuda.shared_tiles import MMA_ROWS, WordTile
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry

DEPTH = 8  # of m16n8k8
HALF = 4  # rows of k from a lane's first number of a fragment of w to its second


def float32_warp_products(g: GemmGeometry):
    """The functions of `warp_products`: `load`, `multiply`, `a_lane` and `w_lane`."""
    row_tiles, col_tiles, a_tile, w_tile = g.row_tiles, g.col_tiles, g.a_tile, g.w_tile
    parts = fragment_products(g.problem.float32)
    wait = in_turn(g.problem.float32, row_tiles, col_tiles)

    def a_lane(start, warp, lane):
        """Address of the row that this lane gives to ldmatrix for its warp's first 16×8 tile of a."""
        return start + a_tile.offset(warp // g.config.warps_n * g.warp_m + lane % 16, lane // 16)

    def w_lane(start, warp, lane):
        """Address of the row that this lane gives to ldmatrix for two n8 tiles of w ("nk"), or of its first number."""
        first = warp % g.config.warps_n * g.warp_n
        if isinstance(w_tile, WordTile):
            return start + w_tile.word(lane % HALF, first + lane // 4)
        return start + w_tile.offset(first + lane // 16 * 8 + lane % 8, lane // 8 % 2)

    @T.inline
    def load_w(w, fragment_set, lane_address, step):
        if isinstance(w_tile, WordTile):
            down = T.meta_var(step * DEPTH * w_tile.pitch)
            for n in T.unroll(col_tiles):
                wi = T.meta_var((fragment_set * col_tiles + n) * 2)
                T.ptx["ld.shared.b32"](w[wi], address(w_tile.step(lane_address, 2 * n) + down))
                T.ptx["ld.shared.b32"](w[wi + 1], address(w_tile.step(w_tile.beside(lane_address, HALF), 2 * n) + down))
        else:
            for pair in T.unroll(col_tiles // 2):
                wi = T.meta_var((fragment_set * col_tiles + 2 * pair) * 2)
                T.ptx[LDMATRIX](
                    w[wi], w[wi + 1], w[wi + 2], w[wi + 3],
                    address(w_tile.step(lane_address, 2 * step) + pair * MMA_ROWS * w_tile.pitch),
                )  # fmt: skip

    @T.inline
    def load(a, w, fragment_set, a_address, w_address, step):
        for m in T.unroll(row_tiles):
            ai = T.meta_var((fragment_set * row_tiles + m) * 4)
            T.ptx[LDMATRIX](
                a[ai], a[ai + 1], a[ai + 2], a[ai + 3],
                address(a_tile.step(a_address, 2 * step) + m * MMA_ROWS * a_tile.pitch),
            )  # fmt: skip
        load_w(w, fragment_set, w_address, step)

    @T.inline
    def multiply(acc, a, w, fragment_set, shared):
        a_parts = T.alloc_local([row_tiles * parts.a_size], "uint32")
        w_parts = T.alloc_local([parts.b_size], "uint32")
        for m in T.unroll(row_tiles):
            ai = T.meta_var((fragment_set * row_tiles + m) * 4)
            parts.prepare_a(a_parts, m * parts.a_size, lambda i: T.reinterpret("float32", a[ai + i]))
        for n in T.unroll(col_tiles):
            wi = T.meta_var((fragment_set * col_tiles + n) * 2)
            turn = T.meta_var(T.cast(wait(acc, n, shared), "uint32"))
            parts.prepare_b(w_parts, 0, lambda i: T.reinterpret("float32", w[wi + i] | turn))
            for m in T.unroll(row_tiles):
                parts.multiply(acc, (m * col_tiles + n) * 4, a_parts, m * parts.a_size, w_parts, 0)

    return SimpleNamespace(load=load, multiply=multiply, a_lane=a_lane, w_lane=w_lane)
