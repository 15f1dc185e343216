"""The CUDA kernel of a grouped product: the tile of a matrix product, for rows of one group and the group's weight.

A CTA owns a tile of `block_m` rows of one group, which it finds from the offsets, and of `block_n` columns.  The grid
has as many tiles of rows as any offsets can make; CTAs past the last one end at once.
"""

from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import shared_memory
from tir_kernels.fusion.gemm.finish.epilogue import epilogue
from tir_kernels.fusion.gemm.products.wgmma import warpgroup_product
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry
from tir_kernels.fusion.gemm.tile import tile_product
from tir_kernels.fusion.grouped.find import row_tile_search
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.problem import GemmProblem


@dataclass(frozen=True)
class RowsOfGroup(GemmProblem):
    """The product that a tile is part of: that of the rows before the end of its group, an expression of the kernel."""

    def __post_init__(self):
        """Nothing is checked: `GroupedProblem` has checked all but the end."""


class GroupedGeometry(GemmGeometry):
    """The sizes of a tile of a group's rows: any may have rows past the group's end."""

    @property
    def m_ends(self) -> bool:
        return True

    @property
    def streams(self) -> bool:
        return False  # how many rows a group has is known on the device only


class Matrix:
    """One of the matrices that a buffer holds, with the addresses of its elements."""

    def __init__(self, buffer, index):
        self.buffer, self.index = buffer, index

    def ptr_to(self, indices):
        """The address of an element, (row, column)."""
        return self.buffer.ptr_to([self.index, *indices])


def rows_of_group(problem: GroupedProblem, end) -> RowsOfGroup:
    """The product of the rows before `end`, which may be an expression."""
    p = problem
    return RowsOfGroup(end, p.n, p.dtype, p.steps, k=p.k, w_layout=p.w_layout, gate=p.gate)


def geometry(problem: GroupedProblem, config: GemmConfig) -> GroupedGeometry:
    """The sizes of every tile."""
    return GroupedGeometry(rows_of_group(problem, problem.m), config)


def grid_size(problem: GroupedProblem, config: GemmConfig) -> int:
    """CTAs of the grid."""
    return problem.row_tiles(config.block_m) * geometry(problem, config).n_tiles


def grouped_kernel(problem: GroupedProblem, config: GemmConfig, name: str) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, offsets, out."""
    g = geometry(problem, config)
    find = row_tile_search(problem, config.block_m)
    product_of = warpgroup_product if config.warpgroup else tile_product
    ctas, groups = grid_size(problem, config), problem.groups

    def matrix(w, group):
        return Matrix(w, T.cast(group, "int64") if problem.is_large else group)

    def tile_geometry(end):
        return GroupedGeometry(rows_of_group(problem, end), config)

    @T.jit(private=True)
    def kernel(a_handle: T.handle, w_handle: T.handle, offsets_handle: T.handle, out_handle: T.handle):
        a = T.match_buffer(a_handle, (problem.m, problem.k), problem.dtype, align=16)
        w = T.match_buffer(w_handle, problem.w_shape, problem.dtype, align=16)
        offsets = T.match_buffer(offsets_handle, (groups,), problem.offsets_dtype)
        out = T.match_buffer(out_handle, (problem.m, problem.n), problem.dtype, align=16)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.ctas_per_multiprocessor})
        cta = T.cta_id([ctas])
        thread = T.thread_id([g.threads])
        base = T.meta_var(shared_memory(g.shared_bytes, align=1024 if config.warpgroup else 128))
        found = T.alloc_local([3], "int32")
        acc = T.alloc_local([4 * g.row_tiles * g.col_tiles], "float32")
        row_words = T.alloc_local([1], "uint32")
        find(found, offsets, cta // g.n_tiles, thread % 32)
        column = cta % g.n_tiles * config.block_n
        if found[0] >= 0:
            group = found[0]
            row = found[1]
            end = found[2]
            tile = T.meta_var(tile_geometry(end))
            if group < groups:
                product = T.meta_var(product_of(tile))
                product(acc, base, thread, a, matrix(w, group), row, column, 0, g.k_blocks)
            else:
                for i in T.unroll(4 * g.row_tiles * g.col_tiles):
                    acc[i] = T.float32(0)
            T.cuda.cta_sync()
            finish = T.meta_var(epilogue(tile))
            finish.store(acc, base, thread, row_words, [], out, row, column)

    return finished(kernel, f"{name}_{config.symbol}", (), fills=True)
