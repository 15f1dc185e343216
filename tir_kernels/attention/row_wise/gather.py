"""Device code of the CUDA row-wise kernel that reads the keys, values and bias of a tile of tokens."""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.block_wise.softmax import before_bias
from tir_kernels.attention.row_wise.geometry import RowWiseGeometry
from tir_kernels.cuda.ptx import ALL_LANES, address
from tir_kernels.cuda.shared_tiles import CHUNK_BYTES, SharedTile


def token_gather(g: RowWiseGeometry):
    """`gather(start, lane, column, exists, k_rows, v_rows)`: one warp starts copying 16 tokens' keys and values.

    Lane l holds the position of token l % 16 in `column`; k_rows and v_rows(token, element) are global addresses.
    Nothing is copied unless `exists`, the same for the whole warp.  The caller commits and waits.
    """
    k_tile, v_tile = g.warp.k_tile, g.warp.v_tile
    same_rows = k_tile.threads_per_row == v_tile.threads_per_row

    @T.inline
    def find(tokens, tile, lane, column):
        """Find the token that this lane copies in each pass; the shuffles must come before the warp diverges."""
        for i in T.unroll(tile.passes):
            row = T.meta_var(lane // tile.threads_per_row + i * tile.rows_per_pass)
            tokens[i] = T.tvm_warp_shuffle(T.uint32(ALL_LANES), column[0], row, 32, 32)

    @T.inline
    def gather(start, lane, column, exists, k_rows, v_rows):
        k_tokens = T.alloc_local([k_tile.passes], "int32")
        v_tokens = T.alloc_local([v_tile.passes], "int32")
        find(k_tokens, k_tile, lane, column)
        if not same_rows:
            find(v_tokens, v_tile, lane, column)
        if exists:
            _copy(k_tile, g.problem.head_dim)(start, lane, k_tokens, k_rows)
            _copy(v_tile, g.problem.v_head_dim)(start + k_tile.size, lane, k_tokens if same_rows else v_tokens, v_rows)

    return gather


def _copy(tile: SharedTile, dim: int):
    """`copy(start, lane, tokens, pointer)`: start copying rows of tokens; elements past `dim` become zeros."""
    real_chunks = dim // tile.chunk

    @T.inline
    def copy_chunk(dst, chunk, source):
        if real_chunks < tile.chunks:
            size = T.meta_var(T.Select(chunk < real_chunks, T.uint32(CHUNK_BYTES), T.uint32(0)))
            T.ptx["cp.async.cg.shared.global.L2::128B"](address(dst), source, CHUNK_BYTES, size)
        else:
            T.ptx["cp.async.cg.shared.global.L2::128B"](address(dst), source, CHUNK_BYTES)

    @T.inline
    def copy_part(base, chunk, part, tokens, pointer):
        for i in T.unroll(tile.passes):
            to = T.meta_var(tile.pass_offset(base, i) + part * (tile.threads_per_row * CHUNK_BYTES))
            copy_chunk(to, chunk, pointer(tokens[i], chunk * tile.chunk))

    @T.inline
    def copy(start, lane, tokens, pointer):
        row = T.meta_var(lane // tile.threads_per_row)
        chunk = T.meta_var(lane % tile.threads_per_row)
        base = start + tile.offset(row, chunk)
        for part in T.unroll(tile.parts):
            at = T.meta_var(chunk + part * tile.threads_per_row)
            if tile.chunks % tile.threads_per_row != 0:
                if at < tile.chunks:
                    copy_part(base, at, part, tokens, pointer)
            else:
                copy_part(base, at, part, tokens, pointer)

    return copy


def score_bias(g: RowWiseGeometry):
    """`load(values, bias, columns, tile, b, kv_head, first_row, lane)` and `apply(s, values)`: s = scale * s + bias.

    A softcap comes before the bias.  `values` are the biases of the 8 scores that the lane has of 16×16.  Rows past the
    last read a bias that exists.
    """
    problem, scores = g.problem, 4 * g.warp.score_tiles

    @T.inline
    def load(values, bias, columns, tile, b, kv_head, first_row, lane):
        column = T.alloc_local([scores // 2], "int32")
        for i in T.unroll(scores // 2):
            column[i] = columns[tile, i // 2 * 8 + lane % 4 * 2 + i % 2]
        for i in T.unroll(scores):
            row = T.meta_var(T.min(first_row + i % 4 // 2 * 8 + lane // 4, g.rows - 1))
            head = T.meta_var(kv_head * problem.group + row // problem.q_len)
            index = T.meta_var(problem.bias_index(b, head, row % problem.q_len, column[i // 4 * 2 + i % 2]))
            values[i] = T.cast(bias[index], "float32")

    @T.inline
    def apply(s, values):
        for i in T.unroll(scores):
            s[i] = before_bias(problem, s[i]) + values[i]

    return SimpleNamespace(load=load, apply=apply)
