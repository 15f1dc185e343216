"""Cases that are compiled but not run: large problems, whose addresses and epilogues ask for the most registers."""

from block_map_cases import block_map_cases
from gemm_cases import BIAS, GATE, GELU, RESIDUAL, SILU, GemmCase, problem
from grouped_cases import GroupedCase
from mlp_cases import MlpCase, mlp
from row_cases import LAYER_NORM, RMS_NORM, RowCase

from tir_kernels.cuda.device import gpu_of
from tir_kernels.cuda.float32.modes import MODES
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm import gemm_norm as gemm_norm_cuda
from tir_kernels.fusion.gemm import gemv as gemv_cuda
from tir_kernels.fusion.gemm.gemv import GemvConfig
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import FLOAT32_TILES, TILES, TMA_TILES, WARPGROUP_TILES, legal_configs
from tir_kernels.fusion.grouped import grouped as grouped_cuda
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.mlp import mlp as mlp_cuda
from tir_kernels.fusion.mlp.configs import TILES as MLP_TILES
from tir_kernels.fusion.mlp.geometry import MlpConfig
from tir_kernels.fusion.problem import RowProblem
from tir_kernels.fusion.rows import chain as row_chain_cuda
from tir_kernels.fusion.rows import norm as row_norm_cuda
from tir_kernels.fusion.rows import rotary as row_rotary_cuda
from tir_kernels.fusion.rows.embedding import EmbeddingProblem, Table
from tir_kernels.fusion.rows.geometry import row_configs
from tir_kernels.fusion.rows.rotary import RotaryProblem
from tir_kernels.target import parse_target

TARGET = parse_target("cuda -arch=sm_80")
HOPPER = parse_target("cuda -arch=sm_90a")


def compile_only_cases() -> list[GemmCase | MlpCase | RowCase | GroupedCase]:
    return [
        *_products(),
        *_products_in_float32(),
        *_products_by_warpgroups(),
        *_grouped_products(),
        *_norms(),
        *_two_products(),
        *_few_rows(),
        *_rows(),
        *block_map_cases(),
    ]


def _products():
    cases = []
    for block_m, block_n, warps_m, warps_n in TILES:
        for w_layout in ("nk", "kn"):
            given = problem(4001, 4104, 1032, steps=(BIAS, SILU, GATE, RESIDUAL), w_layout=w_layout)
            config = GemmConfig(block_m, block_n, 32, warps_m, warps_n, 4)
            if config in gemm_cuda.configs(given, TARGET):
                cases.append(GemmCase(gemm_cuda, given, config))
    wide = problem(2048, 4096, 1024, steps=(BIAS, GELU))
    many_splits = problem(128, 768, 3072, "bfloat16", steps=(SILU, GATE))
    cases.append(GemmCase(gemm_cuda, wide, GemmConfig(128, 256, 32, 2, 4, 4)))
    cases.append(GemmCase(gemm_cuda, many_splits, GemmConfig(64, 64, 64, 2, 2, 4, 4)))
    return cases


def _products_in_float32():
    """Every tile, and the most splits of k that each may have."""
    cases = []
    for block_m, block_n, warps_m, warps_n in FLOAT32_TILES:
        for mode in MODES:
            given = dict(dtype="float32", float32=mode)
            for w_layout in ("nk", "kn"):
                large = problem(4001, 4104, 1032, steps=(BIAS, SILU, GATE, RESIDUAL), w_layout=w_layout, **given)
                cases.append((large, GemmConfig(block_m, block_n, 32, warps_m, warps_n, 3)))
        few = problem(128, 768, 3072, steps=(SILU, GATE), dtype="float32")
        sizes = block_m, block_n, 32, warps_m, warps_n, 3
        splits = [c.splits for c in legal_configs(few, TARGET) if c == GemmConfig(*sizes, c.splits)]
        cases.append((few, GemmConfig(*sizes, max(splits))))
    return [GemmCase(gemm_cuda, *case) for case in cases if case[1] in legal_configs(case[0], TARGET)]


def _products_by_warpgroups():
    cases = []
    for block_m, block_n, warps_m, warps_n, *sets in [*WARPGROUP_TILES, *TMA_TILES]:
        copies = {"tma": True, "sets": sets[0]} if sets else {}
        for w_layout in ("nk", "kn"):
            config = GemmConfig(block_m, block_n, 64, warps_m, warps_n, 3, warpgroup=True, **copies)
            for steps in ((BIAS, GELU, RESIDUAL), (BIAS, GELU)):  # the largest tile has no registers for a residual
                given = problem(4001, 4104, 1032, steps=steps, w_layout=w_layout)
                if config in gemm_cuda.configs(given, HOPPER):
                    cases.append(GemmCase(gemm_cuda, given, config))
                    break
    return cases


def _grouped_products():
    """Weights of 2^31 elements and more, whose addresses are 64-bit; gated, every tile of warpgroups."""
    given = GroupedProblem(4096, 4096, 7168, 256, "bfloat16")
    sizes = (16, 64, 64, 1, 4, 6), (128, 256, 64, 2, 4, 3)
    cases = [GroupedCase(given, GemmConfig(*tile)) for tile in sizes]
    for w_layout in ("nk", "kn"):
        for gathered in ({}, {"gathered_from": 512, "rows_dtype": "int64"}):
            gated = GroupedProblem(4096, 4096, 7168, 256, "bfloat16", w_layout, "int64", "silu", **gathered)
            cases += [GroupedCase(gated, config) for config in grouped_cuda.configs(gated, HOPPER) if config.warpgroup]
    return cases


def _norms():
    return [
        GemmCase(
            gemm_norm_cuda, problem(1000, n, 1024, steps=(BIAS, RESIDUAL), norm=LAYER_NORM, keeps_sum=True), config
        )
        for n in (768, 1024, 3072)
        for config in (GemmConfig(32, 64, 64, 1, 4, 4, 2), GemmConfig(128, 128, 64, 2, 4, 3))
    ]


def _two_products():
    """What needs the most registers: ends everywhere, matrices on both sides, a block of k and several."""
    cases = []
    for tile in MLP_TILES:
        for inner in (56, 184, 504):
            given = mlp(4001, 1032, inner, 1032, inner_steps=(BIAS, GATE, SILU), steps=(BIAS, SILU, GATE, RESIDUAL))
            config = MlpConfig(*tile, 3)
            if config in mlp_cuda.configs(given, TARGET):
                cases.append(MlpCase(given, config))
    return cases


def _few_rows():
    return [
        GemmCase(gemv_cuda, problem(m, 4096, 4096, steps=(BIAS, RESIDUAL)), config)
        for m in (1, 16)
        for config in (GemvConfig(8, 16, 8), GemvConfig(32, 8, 4), GemvConfig(16, 8, 8))
    ]


def _rows():
    cases = []
    for n in (64, 768, 1000, 1024, 4096, 16384):
        given = RowProblem(4096, n, "float16", (BIAS, RESIDUAL), LAYER_NORM)
        cases += [RowCase(given, config) for config in row_configs(4096, n, gpu_of(TARGET))]
    for n, dtype in ((1024, "float32"), (4096, "bfloat16"), (32768, "float16")):
        given = RowProblem(4096, n, dtype, (BIAS, RESIDUAL), RMS_NORM, keeps_sum=True)
        cases.append(RowCase(given, row_norm_cuda.configs(given, TARGET)[0]))
    chain = RowProblem(8192, 4096, "float16", (BIAS, GELU, GATE, RESIDUAL))
    cases += [RowCase(chain, config) for config in row_chain_cuda.configs(chain, TARGET)]
    bert = (Table(30522), Table(512, 512), Table(2))
    for n in (768, 4096):
        given = EmbeddingProblem(4096, n, "float16", bert, norm=LAYER_NORM)
        cases += [RowCase(given, config) for config in row_configs(4096, n, gpu_of(TARGET))[:1]]
    rotary = RotaryProblem(8, 2048, 32, 8, 128, "float16", 48)
    return cases + [RowCase(rotary, config) for config in row_rotary_cuda.configs(rotary, TARGET)]
