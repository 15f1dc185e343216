"""The CUDA kernel of two products, each with steps, from the device code of the modules beside it.

A CTA owns some rows of a.  Their first product goes to shared memory, rounded to half precision as it would be in
memory, and is the a of the second product.  So there is one launch instead of two, and the first product never goes
through memory.
"""

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import shared_memory
from tir_kernels.fusion.gemm.tile import tile_product
from tir_kernels.fusion.mlp.geometry import MlpConfig, MlpGeometry
from tir_kernels.fusion.mlp.tile import inner_results, second_product
from tir_kernels.fusion.problem import MlpProblem
from tir_kernels.fusion.steps import match_operands

MAX_INNER_OPERANDS = 2
MAX_OPERANDS = 4


def mlp_kernel(problem: MlpProblem, config: MlpConfig, name: str) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, the first w and its steps' operands, the second w and its steps' operands, out."""
    g = MlpGeometry(problem, config)
    one, two = problem.first, problem.second
    product, inner, rest = tile_product(g.first), inner_results(g), second_product(g)
    n_inner, n_outer = len(one.operand_shapes), len(two.operand_shapes)
    acc_size = max(4 * p.row_tiles * p.col_tiles for p in (g.first, g.second))

    @T.jit(private=True)
    def kernel(
        a_handle: T.handle,
        w_handle: T.handle,
        inner0: T.Optional(T.handle),
        inner1: T.Optional(T.handle),
        w2_handle: T.handle,
        handle0: T.Optional(T.handle),
        handle1: T.Optional(T.handle),
        handle2: T.Optional(T.handle),
        handle3: T.Optional(T.handle),
        out_handle: T.handle,
    ):
        a = T.match_buffer(a_handle, (one.m, one.k), one.dtype, align=16)
        w = T.match_buffer(w_handle, one.w_shape, one.dtype, align=16)
        w2 = T.match_buffer(w2_handle, two.w_shape, two.dtype, align=16)
        handles = T.meta_var((inner0, inner1)[:n_inner] + (handle0, handle1, handle2, handle3)[:n_outer])
        operands = T.meta_var(match_operands(handles, one.operands + two.operands))
        out = T.match_buffer(out_handle, (two.m, two.n), two.dtype, align=16)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.ctas_per_multiprocessor})
        cta = T.cta_id([g.ctas])
        thread = T.thread_id([g.threads])
        base = T.meta_var(shared_memory(g.shared_bytes, align=128))
        row = cta // config.parts * config.block_m
        first_tile = cta % config.parts * g.tiles_per_part
        tiles = T.min(g.tiles_per_part, g.second.n_tiles - first_tile)
        column = first_tile * config.block_n
        acc = T.alloc_local([acc_size], "float32")
        inner_words = T.alloc_local([max(inner.row_size, 1)], "uint32")
        row_words = T.alloc_local([max(rest.row_size, 1)], "uint32")

        for tile in T.serial(g.inner_tiles):
            inner_column = T.meta_var(tile * g.inner_width)
            inner.fetch(inner_words, operands[:n_inner], thread, inner_column)
            product(acc, base, thread, a, w, row, inner_column, 0, g.first.k_blocks)
            T.cuda.cta_sync()
            if tile == g.inner_tiles - 1:
                rest.start(base, thread, w2, column, tiles)
                rest.begin(row_words, operands[n_inner:], thread, row, column)
            inner.store(acc, base, thread, inner_words, operands[:n_inner], row, inner_column)
        rest.walk(acc, base, thread, w2, row_words, operands[n_inner:], out, row, column, tiles)

    absent = [f"inner{i}" for i in range(n_inner, MAX_INNER_OPERANDS)]
    absent += [f"handle{i}" for i in range(n_outer, MAX_OPERANDS)]
    return finished(kernel, f"{name}_{config.symbol}", absent, fills=True)
