"""Predicted time of the CUDA kernel of two products, from sizes and the architecture.

The model has the terms of `gemm/sizes/cost.py`, with the coefficients fitted there for mma.sync.  A CTA computes the
blocks and epilogues of both products:

    wave     = resident * (blocks1 * block1 + blocks2 * block2 + elements * epilogue) + start
    memory   = bytes of all inputs and the output / bandwidth
    counted  = launch + max(waves, memory)
    time     = SLOPE * counted + OFFSET_US

blocks1 counts all blocks of k of the first product's tiles, blocks2 those of the second product's tiles in one part of
its columns; elements are those of both.  The kernel saves a launch and the bytes of the intermediate result.  It loses
parallelism: fewer CTAs, each with more blocks one after the other, and a first product for every part.  Only SLOPE and
OFFSET_US are fitted to this kernel: to 16 problems on an H200 (128 to 4096 rows), off by 10 % (root mean square).  For
15 of them the model predicts correctly whether this kernel is faster than two kernels; at 4096×768×64×768 it predicts
that it is slower, but it is 2 % faster.
"""

import functools

from tir_kernels.cuda.device import GPU
from tir_kernels.cuda.shared_tiles import ELEMENT_BYTES
from tir_kernels.fusion.gemm.sizes.cost import FITTED, Coefficients, soft_max
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, operand_bytes
from tir_kernels.fusion.mlp.geometry import MlpConfig, MlpGeometry
from tir_kernels.fusion.problem import MlpProblem

SLOPE, OFFSET_US = 1.2, -1.0


@functools.lru_cache(maxsize=1 << 13)  # lists of configurations are sorted by this time, then a search asks again
def predict_mlp_us(problem: MlpProblem, config: MlpConfig, gpu: GPU) -> float:
    """Predicted microseconds of the kernel; see the module's description."""
    g, c = MlpGeometry(problem, config), FITTED
    fits = min(g.ctas_per_multiprocessor, gpu.ctas_that_share(g.shared_bytes))
    most = max(1, fits)
    full_waves, rest = divmod(g.ctas, most * gpu.multiprocessors)
    waves = full_waves * _wave_us(g, most, c) + _wave_us(g, -(-rest // gpu.multiprocessors), c)
    counted = c.launch + soft_max(c.soft, waves, mlp_bytes(problem) / gpu.bandwidth)
    return SLOPE * counted + OFFSET_US


def _wave_us(g: MlpGeometry, resident: int, c: Coefficients) -> float:
    if resident == 0:
        return 0.0
    blocks1, blocks2 = g.inner_tiles * g.first.k_blocks, g.tiles_per_part * g.second.k_blocks
    elements = g.config.block_m * (g.inner_tile.dim + g.tiles_per_part * g.config.block_n)
    first = blocks1 * _block_us(g.first, g.first.stage_bytes, blocks1, resident, c)
    second = blocks2 * _block_us(g.second, g.w_tile.size, blocks2, resident, c)
    return resident * (first + second + c.element * elements) + c.start


def _block_us(g: GemmGeometry, copied: int, blocks: int, resident: int, c: Coefficients) -> float:
    """Microseconds that a product takes for one block of k, with `copied` bytes copied to shared memory."""
    config = g.config
    read = config.warps * (g.warp_m + g.warp_n) * config.block_k * ELEMENT_BYTES
    work = c.product * config.block_m * config.block_n * config.block_k + c.shared * (read + copied)
    latency = soft_max(c.soft, c.wait, c.copy / min(config.stages - 1, blocks))
    return soft_max(c.soft, work, latency / resident)


def mlp_bytes(problem: MlpProblem) -> int:
    """Bytes that are read once and written once: those of both products without the result between them."""
    between = 2 * problem.m * problem.first.n * ELEMENT_BYTES
    return operand_bytes(problem.first) + operand_bytes(problem.second) - between
