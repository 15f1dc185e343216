"""Device code that copies tiles from global to shared memory, by cp.async.

The functions are inlined into a kernel while it is parsed.  Shared-memory addresses are int32 byte addresses of the
shared window; loops over compile-time extents are unrolled, so fragments stay in registers.
"""

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.shared_tiles import CHUNK_BYTES, SharedTile


def tile_copy(tile: SharedTile, dim: int, length: int, rows_may_end: bool, stride: int = 1):
    """`copy(dst, thread, pointer, first_row)`: start copying rows of a (length, dim) matrix into `tile`.

    The rows are first_row, first_row + stride, ….  `pointer(row, element)` is the global address.  Rows past `length`
    (only if `rows_may_end`) and elements past `dim` become zeros.  The caller commits and waits.
    """
    real_chunks = dim // tile.chunk
    predicated = rows_may_end or real_chunks < tile.chunks
    idle_threads = tile.chunks % tile.threads_per_row != 0
    part_bytes = tile.threads_per_row * CHUNK_BYTES
    idle_rows = tile.passes * tile.rows_per_pass > tile.rows

    def tile_exists(row, chunk):
        if not rows_may_end:
            return chunk < real_chunks
        return (row < length) if real_chunks == tile.chunks else T.And(row < length, chunk < real_chunks)

    @T.inline
    def copy_chunk(dst, pointer, row, chunk):
        if predicated:
            exists = T.meta_var(tile_exists(row, chunk))
            T.ptx["cp.async.cg.shared.global.L2::128B"](
                address(dst),
                pointer(row, chunk * tile.chunk),
                CHUNK_BYTES,
                T.Select(exists, T.uint32(CHUNK_BYTES), T.uint32(0)),
            )
        else:
            T.ptx["cp.async.cg.shared.global.L2::128B"](address(dst), pointer(row, chunk * tile.chunk), CHUNK_BYTES)

    @T.inline
    def copy(dst, thread, pointer, first_row):
        row = T.meta_var(thread // tile.threads_per_row)
        chunk = T.meta_var(thread % tile.threads_per_row)
        base = dst + tile.offset(row, chunk)
        for i in T.unroll(tile.passes):
            source = T.meta_var(first_row + (row + i * tile.rows_per_pass) * stride)
            for part in T.unroll(tile.parts):
                dst_of_part = T.meta_var(tile.pass_offset(base, i) + part * part_bytes)
                chunk_of_part = T.meta_var(chunk + part * tile.threads_per_row)
                if idle_threads or idle_rows:
                    if T.And(chunk_of_part < tile.chunks, row + i * tile.rows_per_pass < tile.rows):
                        copy_chunk(dst_of_part, pointer, source, chunk_of_part)
                else:
                    copy_chunk(dst_of_part, pointer, source, chunk_of_part)

    return copy
