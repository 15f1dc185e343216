"""The CUDA kernel of a matrix product, its steps and perhaps a norm, from the device code of the modules beside it.

A CTA owns one tile of the product and writes it once, with every step of the problem applied to the float32
accumulators.  Tiles are visited in groups that share rows and columns in the L2 cache.  If a product has too few tiles
to fill the GPU, k is split among CTAs, and the last CTA to arrive adds the partial sums in a fixed order.  With a norm,
the last CTA to finish a tile of some rows then normalises these rows, while other CTAs still compute theirs.
"""

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional, shared_memory
from tir_kernels.fusion.gemm.finish.epilogue import arrival, epilogue, split_functions
from tir_kernels.fusion.gemm.finish.norm_phase import row_normalization
from tir_kernels.fusion.gemm.products.wgmma import warpgroup_product
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, partials_shape
from tir_kernels.fusion.gemm.tile import row_of, tile_of, tile_product
from tir_kernels.fusion.problem import GemmProblem
from tir_kernels.fusion.steps import match_operands

MAX_OPERANDS = 6


def gemm_workspace(g: GemmGeometry) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of partial sums and arrival counters, if the kernel needs them."""
    partials = [(partials_shape(g), "float32")] if g.n_split_counters else []
    return partials + ([((g.n_counters,), "uint32")] if g.n_counters else [])


def gemm_kernel(problem: GemmProblem, config: GemmConfig, name: str) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, `problem.operands`, the workspace, out, out_sum or statistics if any."""
    g = GemmGeometry(problem, config)
    product = (warpgroup_product if config.warpgroup else tile_product)(g)
    finish, split = epilogue(g), split_functions(g)
    arrive = arrival(g.sync_offset)
    splits = config.splits
    step_operands = sum(step.operand is not None for step in problem.steps)
    if problem.norm is not None:
        prefetch_norm, normalize = row_normalization(g, problem.norm)

    @T.jit(private=True)
    def kernel(
        a_handle: T.handle,
        w_handle: T.handle,
        handle0: T.Optional(T.handle),
        handle1: T.Optional(T.handle),
        handle2: T.Optional(T.handle),
        handle3: T.Optional(T.handle),
        handle4: T.Optional(T.handle),
        handle5: T.Optional(T.handle),
        partials_handle: T.Optional(T.handle),
        arrivals_handle: T.Optional(T.handle),
        out_handle: T.handle,
        sum_handle: T.Optional(T.handle),
        statistics_handle: T.Optional(T.handle),
    ):
        a = T.match_buffer(a_handle, (problem.m, problem.k), problem.dtype, align=16)
        w = T.match_buffer(w_handle, problem.w_shape, problem.dtype, align=16)
        operands = T.meta_var(match_operands((handle0, handle1, handle2, handle3, handle4, handle5), problem.operands))
        partials = T.meta_var(match_optional("partials", partials_handle, partials_shape(g), "float32", align=16))
        arrivals = T.meta_var(match_optional("arrivals", arrivals_handle, (g.n_counters,), "uint32"))
        out = T.match_buffer(out_handle, (problem.m, problem.n), problem.dtype, align=16)
        out_sum = T.meta_var(match_optional("out_sum", sum_handle, (problem.m, problem.n), problem.dtype, align=16))
        stored = T.meta_var(out if out_sum is None else out_sum)  # a norm reads its input where its output will be
        statistics = T.meta_var(match_optional("statistics", statistics_handle, *problem.outputs[-1], align=16))

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.ctas_per_multiprocessor})
        cta = T.cta_id([g.ctas])
        thread = T.thread_id([g.threads])
        base = T.meta_var(shared_memory(g.shared_bytes, align=1024 if config.warpgroup else 128))
        tile = T.meta_var(tile_of(g, cta))
        row_tile = tile[0]
        row = row_of(g, row_tile)
        column = tile[1] * config.block_n
        acc = T.alloc_local([4 * g.row_tiles * g.col_tiles], "float32")
        last = T.alloc_local([1], "uint32")
        begin = cta % splits * g.blocks_per_split
        end = T.min(begin + g.blocks_per_split, g.k_blocks)

        row_words = T.alloc_local([max(finish.row_size, 1)], "uint32")
        if problem.row_norm is not None:
            kept = T.alloc_local([finish.kept_size], "float32")
            normed = base + g.row_norm_offset + thread // 32 * g.row_norm_bytes
            meanwhile = T.meta_var(lambda: finish.meanwhile(operands, thread, row, kept, normed))
        else:
            kept = T.meta_var(None)
            normed = T.meta_var(None)
            meanwhile = T.meta_var(None)
        finish.begin(row_words, operands, thread, row, column, kept, normed)
        if problem.norm is not None:
            prefetch_norm(operands, step_operands, thread)
        product(acc, base, thread, a, w, row, column, begin, end, meanwhile)
        last[0] = T.uint32(1)
        if splits > 1:
            split.write(partials, cta, thread, acc)
            arrive(last, arrivals, cta // splits, splits, thread, base)
            if last[0] != T.uint32(0):
                split.add(partials, cta - cta % splits, thread, acc)
        else:
            T.cuda.cta_sync()
        if last[0] != T.uint32(0):
            finish.store(acc, base, thread, row_words, operands, stored, row, column, statistics, kept, normed)
            if problem.norm is not None:
                arrive(last, arrivals, g.n_split_counters + row_tile, g.n_tiles, thread, base)
                if last[0] != T.uint32(0):
                    normalize(stored, out, operands, step_operands, thread, row)

    absent = [f"handle{i}" for i in range(len(problem.operands), MAX_OPERANDS)]
    absent += ["partials_handle"] * (splits == 1) + ["arrivals_handle"] * (g.n_counters == 0)
    absent += ["sum_handle"] * (not problem.keeps_sum) + ["statistics_handle"] * (not problem.statistics)
    return finished(kernel, f"{name}_{config.symbol}", absent, fills=True)
