"""Device code of the gate of a matrix product whose columns alternate between a gate and its values."""

from tvm.script import tirx as T

from tir_kernels.cuda.shared_tiles import MMA_COLS
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry
from tir_kernels.fusion.problem import Step
from tir_kernels.fusion.steps import activation


def gated_products(g: GemmGeometry):
    """`gated(acc, operands, column)`: replace the sums of a gate and its values by f(gate) * value.

    Tiles of an mma alternate between the two, so that a thread holds both: the result is in the first half of acc's
    tiles of each row.  `column` is the thread's first of w.
    """
    f = activation(Step(g.problem.gate or "relu"), g.problem.dtype)  # without a gate it is not called

    @T.inline
    def gated(acc, operands, column):
        for n in T.unroll(g.col_tiles // 2):
            bias = T.alloc_local([4], "float32")
            for i in T.unroll(4):
                if g.problem.gate_bias:
                    at = T.meta_var(T.min(column + (2 * n + i // 2) * MMA_COLS + i % 2, g.problem.w_columns - 1))
                    bias[i] = T.cast(operands[0][at], "float32")
                else:
                    bias[i] = T.float32(0)
            for m in T.unroll(g.row_tiles):
                for i in T.unroll(4):
                    first = T.meta_var((m * g.col_tiles + 2 * n) * 4 + i)
                    acc[(m * g.col_tiles + n) * 4 + i] = f(acc[first] + bias[i % 2]) * (
                        acc[first + 4] + bias[2 + i % 2]
                    )

    return gated
