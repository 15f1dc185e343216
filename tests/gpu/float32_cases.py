"""The cases in float32 of the CUDA attention and matrix-product kernels: both modes, every tile, what else there is."""

from dataclasses import replace

from attention_cases import Case, packed_views, problem
from gemm_cases import BIAS, GATE, GELU, RESIDUAL, SILU, GemmCase
from gemm_cases import problem as product

from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.attention.problem import Layouts
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.row_wise.geometry import RowWiseConfig
from tir_kernels.cuda.float32.modes import MODES
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import FLOAT32_TILES, legal_configs
from tir_kernels.fusion.problem import ACTIVATIONS, Step
from tir_kernels.target import parse_target

DEFAULT, SMALL, DECODING = BlockWiseConfig(64, 64, 4, 2), BlockWiseConfig(64, 32, 4, 2), RowWiseConfig(4, 2)
TARGET = parse_target("cuda -arch=sm_80")  # whose shared memory is the smaller


def float32_cases() -> list[Case | GemmCase]:
    """Those that fit an A100's shared memory."""
    attention = [*_block_wise(), *_row_wise()]
    legal = {}  # of a problem with tokens in order
    for case in attention:
        if (key := (case.template.NAME, case.problem)) not in legal:
            legal[key] = case.template.configs(case.problem, TARGET)
    in_order = lambda case: replace(case.config, token_stride=1) if case.template is block_wise_cuda else case.config
    attention = [case for case in attention if in_order(case) in legal[case.template.NAME, case.problem]]
    products = [GemmCase(gemm_cuda, *case) for case in _products()]
    products = [case for case in products if case.config in legal_configs(case.problem, TARGET)]
    return list(dict.fromkeys([*attention, *products]))


def _block_wise() -> list[Case]:
    configs = [BlockWiseConfig(m, n, w, 2) for m, w in block_wise_cuda.ROWS_AND_WARPS for n in (32, 64)]
    configs += [BlockWiseConfig(16, 32, 1, 1), replace(DEFAULT, stages=1), replace(DEFAULT, stages=3)]
    packed = Layouts(*["bshd"] * 4)
    cases = []
    for mode in MODES:
        given = dict(dtype="float32", float32=mode)
        cases += [Case(problem(257, 331, **given), config, "random") for config in configs]
        cases += [
            Case(problem(200, 1500, gives_lse=True, **given), config, "longformer") for config in (DEFAULT, SMALL)
        ]
        for dim in (4, 8, 20, 32, 80, 128, 256):
            for config in (SMALL, BlockWiseConfig(64, 32, 4, 1), *(BlockWiseConfig(16, 32, 1, s) for s in (1, 2))):
                cases.append(Case(problem(257, dim=dim, **given), config, "causal"))
        masks = ("full", "window", "bigbird", "dilated", "prefix", "document", "empty-rows", "one-element")
        cases += [Case(problem(512, batch=2, **given), SMALL, mask) for mask in masks]
        cases.append(Case(problem(300, batch=3, heads=6, kv_heads=1, **given), SMALL, "window/per-batch-head"))
        cases.append(Case(problem(300, dim=64, v_dim=128, **given), SMALL, "window"))
        cases.append(Case(problem(203, batch=2, heads=4, kv_heads=2, layouts=packed, **given), SMALL, "bigbird"))
        viewed = problem(203, batch=2, heads=4, kv_heads=2, dim=20, layouts=packed_views(2, 203, 4, 2, 20), **given)
        cases.append(Case(viewed, SMALL, "bigbird"))
        with_bias = problem(203, 331, batch=2, heads=3, bias_shape=(2, 3, 203, 331), **given)
        cases += [Case(with_bias, SMALL, "bigbird", bias) for bias in ("normal", "infinite", "lowest")]
        parts = problem(515, 700, continues=True, gives_lse=True, **given)
        cases.append(Case(parts, replace(SMALL, token_stride=32), "strided"))
        sunk = problem(192, 331, sink_dtype="float32", gives_lse=True, **given)
        cases.append(Case(sunk, SMALL, "empty-rows"))
        capped = problem(300, scale=1.0, softcap=50.0, heads=4, kv_heads=2, **given)
        cases.append(Case(capped, SMALL, "causal"))
        cases.append(Case(problem(203, scale=-0.2, **given), SMALL, "causal"))
    return cases


def _row_wise() -> list[Case]:
    cases = []
    for mode in MODES:
        given = dict(dtype="float32", float32=mode)
        configs = [RowWiseConfig(2, 2), DECODING, RowWiseConfig(4, 3), RowWiseConfig(8, 2)]
        cases += [Case(problem(1, 4096, dim=128, heads=4, **given), config, "random") for config in configs]
        cases += [Case(problem(2, 700, dim=dim, **given), DECODING, "random") for dim in (4, 20, 64, 136, 256)]
        cases.append(Case(problem(5, 2048, heads=8, kv_heads=2, gives_lse=True, **given), DECODING, "random/per-head"))
        capped = problem(1, 8192, softcap=50.0, sink_dtype="float32", **given)
        cases.append(Case(capped, DECODING, "random"))
    return [case for case in cases if case.config in row_wise_cuda.configs(case.problem, TARGET)]


def _products() -> list:
    cases = []
    for mode in MODES:
        given = dict(dtype="float32", float32=mode)
        for block_m, block_n, warps_m, warps_n in FLOAT32_TILES:
            for w_layout in ("nk", "kn"):
                whole, ragged = (GemmConfig(block_m, block_n, k, warps_m, warps_n, s) for k, s in ((32, 3), (16, 4)))
                cases.append((product(512, 768, 256, steps=(BIAS, GELU), w_layout=w_layout, **given), whole))
                cases.append((product(259, 520, 332, steps=(BIAS, RESIDUAL), w_layout=w_layout, **given), ragged))
        for splits in (2, 4):
            for tile in ((16, 64, 32, 1, 4), (64, 64, 32, 2, 2), (128, 64, 32, 4, 2)):
                split = GemmConfig(*tile, 3, splits)
                cases.append((product(128, 768, 3072, steps=(BIAS, RESIDUAL), **given), split))
        middle = GemmConfig(64, 64, 32, 2, 2, 3)
        cases += [(product(100, 200, 72, steps=(BIAS, Step(kind)), **given), middle) for kind in ACTIVATIONS]
        cases += [
            (product(m, 264, 516, steps=(BIAS, SILU, GATE, RESIDUAL), w_layout=w_layout, **given), middle)
            for m in (1, 1025)
            for w_layout in ("nk", "kn")
        ]
        cases += [(product(96, 128, k, **given), GemmConfig(32, 64, 32, 1, 4, s)) for k in (4, 1000) for s in (2, 4)]
    return cases
