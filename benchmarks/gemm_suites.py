"""What `gpu_gemm_sweep.py` times: lists of (template name, problem, configuration)."""

from tir_kernels.cuda.device import H200
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm.gemv import UNIT, GemvConfig
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import MEASURED, legal_configs, splits_of
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry
from tir_kernels.fusion.mlp import mlp as mlp_cuda
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Norm, Step
from tir_kernels.target import parse_target

BIAS_GELU = (Step("add", "row"), Step("gelu"))
BIAS_RESIDUAL = (Step("add", "row"), Step("add", "matrix"))
BERT = ((3072, 768), (768, 3072), (4096, 1024), (1024, 4096))  # (n, k) of the two products of an MLP
QKV = ((2304, 768), (3072, 1024))
LLAMA = ((2816, 1024), (11008, 4096), (4096, 11008))

# (block_m, block_n, block_k, warps_m, warps_n, stages) and perhaps the splits of k.
FEW_ROWS = [
    GemmConfig(*sizes)
    for sizes in (
        *((32, 64, 64, 1, 4, 4, splits) for splits in (1, 2, 4, 8)),
        *((64, 64, 64, 2, 2, 4, splits) for splits in (1, 2, 4, 8)),
        *((64, 64, 64, 2, 4, 4, splits) for splits in (1, 4)),
        *((32, 128, 64, 1, 4, 4, splits) for splits in (1, 4)),
        *((64, 128, 64, 2, 4, 4, splits) for splits in (1, 4)),
        *((16, 64, 64, 1, 4, 4, splits) for splits in (1, 2)),
        *((16, 128, 64, 1, 4, 4, splits) for splits in (1, 4)),
        (64, 64, 64, 2, 2, 5),
        (32, 64, 64, 1, 4, 5),
    )
]
SOME_ROWS = [
    GemmConfig(*sizes)
    for sizes in (
        (64, 64, 64, 2, 2, 3),
        (64, 64, 64, 2, 2, 4, 2),
        (64, 64, 64, 2, 2, 4, 4),
        (64, 64, 64, 2, 4, 4),
        (64, 128, 64, 2, 2, 3),
        (64, 128, 64, 2, 2, 4),
        (64, 128, 64, 2, 4, 4),
        (64, 128, 64, 2, 4, 4, 2),
        (128, 64, 64, 2, 2, 4),
        (128, 64, 64, 4, 2, 4),
        (128, 64, 64, 4, 2, 4, 2),
        (128, 128, 64, 2, 2, 3),
        (128, 128, 64, 2, 4, 3),
        (128, 128, 64, 2, 4, 4),
        (128, 128, 64, 2, 4, 3, 4),
        (96, 128, 64, 2, 2, 3),
    )
]
MANY_ROWS = [
    GemmConfig(*sizes)
    for sizes in (
        (128, 128, 32, 2, 2, 3),
        (128, 128, 32, 2, 2, 4),
        (128, 128, 64, 2, 2, 3),
        (128, 128, 64, 2, 4, 3),
        (128, 256, 64, 2, 4, 3),
        (128, 256, 32, 2, 4, 4),
        (192, 128, 64, 4, 2, 3),
        (192, 128, 32, 4, 2, 4),
        (256, 128, 64, 4, 2, 3),
        (96, 128, 64, 2, 2, 3),
        (96, 128, 32, 2, 2, 4),
        (64, 128, 64, 2, 2, 3),
        (64, 256, 64, 1, 4, 2),
    )
]


def products(rows, sizes, configs, steps=BIAS_GELU):
    return [
        ("gemm", GemmProblem(m, n, "float16", steps, k=k), config)
        for m in rows
        for n, k in sizes
        for config in configs
        if config.splits in splits_of(GemmGeometry(GemmProblem(m, n, "float16", k=k), config), H200)
    ]


DEEP = [
    GemmConfig(*sizes)
    for sizes in (
        (64, 64, 64, 2, 2, 6),
        (64, 64, 64, 2, 2, 8),
        (64, 64, 64, 2, 2, 12),
        (32, 64, 64, 1, 4, 8),
        (32, 64, 64, 1, 4, 6, 4),
        (64, 64, 64, 2, 2, 6, 4),
        (64, 64, 64, 2, 4, 8, 4),
        (16, 64, 64, 1, 4, 8),
        (16, 128, 64, 1, 4, 6, 4),
        (128, 64, 64, 4, 2, 6),
        (64, 128, 64, 2, 4, 6),
    )
]
DEEP_SOME = [
    GemmConfig(*sizes)
    for sizes in (
        (64, 64, 64, 2, 2, 4),
        (64, 64, 64, 2, 2, 6, 2),
        (128, 128, 64, 2, 4, 5),
        (128, 128, 64, 2, 4, 5, 2),
        (128, 128, 64, 2, 4, 5, 4),
        (128, 128, 64, 2, 2, 5, 4),
        (128, 64, 64, 4, 2, 6, 2),
        (64, 128, 64, 2, 4, 6, 2),
        (96, 128, 64, 2, 2, 6),
    )
]
LAYER_NORM = Norm("layer_norm", 1e-5)
NORM_CONFIGS = {
    128: [(16, 64, 64, 1, 4, 6), (32, 64, 64, 1, 4, 6), (16, 64, 64, 1, 4, 4, 2), (32, 64, 64, 1, 4, 4, 4)]
    + [(16, 128, 64, 1, 4, 4, 4), (64, 64, 64, 2, 4, 6, 4), (64, 64, 64, 2, 2, 6, 4)],
    512: [(32, 64, 64, 1, 4, 4), (64, 64, 64, 2, 4, 5), (64, 64, 64, 2, 2, 5), (64, 64, 64, 2, 2, 4, 2)]
    + [(64, 128, 64, 2, 4, 4), (32, 128, 64, 1, 4, 4)],
    2048: [(64, 64, 64, 2, 4, 4), (64, 128, 64, 2, 4, 4), (128, 128, 64, 2, 4, 3), (96, 128, 64, 2, 2, 3)],
    8192: [(128, 128, 64, 2, 4, 3), (128, 128, 64, 2, 2, 3), (128, 256, 64, 2, 4, 3)],
}


def norms():
    return [
        (name, GemmProblem(m, n, "float16", BIAS_RESIDUAL, norm, k=k), config)
        for m, sizes in NORM_CONFIGS.items()
        for n, k in ((768, 768), (768, 3072), (1024, 4096))
        for name, norm in (("gemm-norm", LAYER_NORM), ("gemm", None))
        for config in (GemmConfig(*s) for s in sizes)
        if config.splits in splits_of(GemmGeometry(GemmProblem(m, n, "float16", k=k), config), H200)
    ]


def decoding():
    configs = [(8, 8, 2), (8, 8, 4), (8, 16, 2), (16, 8, 2), (16, 8, 4), (16, 4, 4), (16, 16, 2), (16, 16, 4)]
    configs += [(32, 8, 2), (32, 8, 4), (32, 16, 2)]
    return [
        ("gemv", GemmProblem(m, n, "float16", BIAS_RESIDUAL[:1], k=k), config)
        for m in (1, 8, 16)
        for n, k in ((768, 768), (3072, 768), (4096, 4096), (11008, 4096), (4096, 11008))
        for config in (GemvConfig(*c) for c in configs)
        if config.warps * config.unroll * UNIT <= k
    ]


def adapters():
    """Two products in one kernel: the three configurations predicted to be the fastest, and the first of each tile."""
    target, jobs = parse_target("cuda -arch=sm_90a"), []
    for n, inner in ((768, 64), (1024, 128), (256, 512), (768, 256)):
        for m in (128, 512, 2048, 4096, 32768):
            first = GemmProblem(m, inner, "float16", BIAS_GELU, k=n)
            problem = MlpProblem(first, GemmProblem(m, n, "float16", BIAS_RESIDUAL, k=inner))
            configs = mlp_cuda.configs(problem, target)
            of_tiles = {(c.block_m, c.block_n, c.warps_m, c.warps_n): c for c in reversed(configs)}
            jobs += [("mlp", problem, config) for config in dict.fromkeys([*configs[:3], *of_tiles.values()])]
    return jobs


def warpgroups(*sizes, **rest):
    return [GemmConfig(*one, warpgroup=True, **rest) for one in sizes]


# Of few rows, without and with a deep k; then of more.
HOPPER_128 = warpgroups((64, 64, 64, 4, 1, 12), (64, 64, 64, 4, 1, 6, 2))
HOPPER_128_DEEP = warpgroups((64, 64, 64, 4, 1, 6, 2), (64, 64, 64, 4, 1, 6, 4), (64, 64, 64, 4, 1, 6, 8))
HOPPER_512 = warpgroups((128, 128, 64, 8, 1, 6), (128, 64, 64, 8, 1, 8), (64, 64, 64, 4, 1, 12), tma=True)
HOPPER_512 += warpgroups((64, 128, 64, 4, 1, 8), tma=True, sets=2)
HOPPER_512_DEEP = warpgroups((128, 64, 64, 8, 1, 6, 2), (64, 128, 64, 4, 1, 4, 2), (64, 64, 64, 4, 1, 6, 2))
HOPPER_2048 = warpgroups((64, 256, 64, 4, 2, 5), (128, 128, 64, 8, 1, 6), (256, 128, 64, 8, 1, 4), tma=True)
HOPPER_2048 += warpgroups((128, 128, 64, 4, 1, 6), (64, 256, 64, 4, 1, 4), (64, 128, 64, 4, 1, 8), tma=True, sets=2)
HOPPER_4096 = warpgroups((64, 256, 64, 4, 2, 5), (256, 128, 64, 8, 1, 4), tma=True)
HOPPER_4096 += warpgroups((128, 128, 64, 4, 1, 6), (64, 256, 64, 4, 1, 4), tma=True, sets=2)


def hopper_many():
    jobs = products([2048], [*BERT, QKV[0]], HOPPER_2048)
    jobs += products([4096], [*BERT, QKV[0], *LLAMA[:2]], HOPPER_4096)
    return jobs + products([32768], [BERT[0], BERT[2]], HOPPER_4096[:3])


def hopper_some():
    jobs = products([512], [*BERT, QKV[0], LLAMA[1]], HOPPER_512)
    return jobs + products([512], BERT[1::2], HOPPER_512_DEEP)


def hopper_few():
    return products([128], [*BERT[::2], QKV[0]], HOPPER_128) + products([128], BERT[1::2], HOPPER_128_DEEP)


# Tiles that fill whole waves of an H200's 132 multiprocessors, beside those that do not; products of few tiles and a
# deep k by clusters, beside those that warps feed.
ONE_WAVE = warpgroups((64, 192, 64, 4, 2, 6), (128, 96, 64, 8, 1, 6), (128, 128, 64, 8, 1, 6), tma=True)
WIDE = warpgroups((128, 192, 64, 8, 1, 5), (128, 256, 64, 8, 1, 4), (64, 256, 64, 4, 2, 5), tma=True)
TWO_SETS = warpgroups(
    (192, 96, 64, 4, 1, 5), (128, 112, 64, 4, 1, 6), (128, 128, 64, 4, 1, 6), (64, 256, 64, 4, 1, 4), tma=True, sets=2
)
CLUSTERS = warpgroups(*((64, 64, 64, 4, 1, 5, splits) for splits in (1, 2, 4)), tma=True)
CLUSTERS += warpgroups((64, 128, 64, 4, 1, 6, 2), (64, 128, 64, 4, 1, 4, 4), (64, 64, 64, 4, 1, 12), tma=True)
FED_BY_WARPS = warpgroups((64, 64, 64, 4, 1, 6, 2), (64, 64, 64, 4, 1, 6, 4), (64, 64, 64, 4, 1, 12))
SM_80_WIDTHS = {
    128: [(64, 64, 64, 2, 2, 12), (64, 64, 64, 2, 2, 6)],
    512: [(128, 96, 64, 2, 2, 4), (64, 128, 64, 2, 4, 4), (128, 128, 64, 2, 4, 3), (128, 128, 64, 2, 2, 3)],
    2048: [(128, 192, 64, 2, 4, 3), (128, 96, 64, 2, 2, 3), (128, 256, 64, 2, 4, 3), (128, 128, 64, 2, 2, 3)],
}


def widths():
    jobs = products([512], [QKV[0], LLAMA[0], BERT[0], QKV[1]], ONE_WAVE)
    jobs += products([2048, 4096], [BERT[1]], ONE_WAVE + WIDE)
    jobs += products([2048, 4096], [QKV[0], LLAMA[0]], TWO_SETS)
    jobs += products([512, 4096], [LLAMA[1]], TWO_SETS + WIDE)
    return jobs + products([128], [LLAMA[1]], ONE_WAVE)


def clusters():
    sizes = [(768, 768), *BERT[1::2], LLAMA[0]]
    return products([128, 512], sizes, CLUSTERS + FED_BY_WARPS)


def sm_80_widths():
    configs = {m: [GemmConfig(*one) for one in sizes] for m, sizes in SM_80_WIDTHS.items()}
    return [job for m in configs for job in products([m], BERT[::2], configs[m])]


# Rows that end in a tile, as vision transformers have them.
VIT = ((2304, 768), (768, 768), (3072, 768), (768, 3072))
ENDING = warpgroups((64, 64, 64, 4, 1, 12)) + warpgroups((64, 64, 64, 4, 1, 8), (64, 128, 64, 4, 1, 6), tma=True)
ENDING += warpgroups((128, 64, 64, 8, 1, 8), (64, 64, 64, 4, 1, 5, 4), tma=True) + [GemmConfig(16, 64, 64, 1, 4, 8)]


def ending_rows():
    return products([129, 513], VIT, ENDING)


# For some numbers of rows, (n, k, gate, steps) of products of models.
IN_MODELS = {
    2048: ((3072, 768, None, BIAS_GELU), (2304, 768, None, ()), (4096, 1024, None, BIAS_GELU), (768, 3072, None, ())),
    4096: (
        (640, 640, None, ()),
        (768, 768, None, ()),
        (896, 4864, None, ()),
        (960, 2560, None, ()),
        (1024, 1024, None, ()),
        (1024, 4096, None, ()),
        (1152, 6912, None, ()),
        (1536, 768, None, ()),
        (2048, 2048, None, ()),
        (2048, 5632, None, ()),
        (2048, 8192, None, ()),
        (2304, 9216, None, ()),
        (2560, 2048, None, ()),
        (3072, 768, None, BIAS_GELU),
        (3072, 1024, None, ()),
        (3072, 2048, None, ()),
        (4096, 1024, None, BIAS_GELU),
        (6144, 2048, None, ()),
        (8192, 2048, None, (Step("add", "row"), Step("gelu_tanh"))),
        (2816, 1024, "gelu", ()),
        (3072, 1024, "silu", ()),
        (5632, 2048, "silu", ()),
        (6912, 1152, "gelu_tanh", ()),
        (8192, 2048, "silu", ()),
        (9216, 2304, "gelu_tanh", ()),
    ),
    6272: ((384, 1536, None, ()), (768, 768, None, ()), (1536, 384, None, BIAS_GELU)),
    8192: ((1152, 1152, None, ()), (3456, 1152, None, ()), (4608, 1152, None, BIAS_GELU), (1152, 4608, None, ())),
    16384: ((768, 768, None, ()), (768, 1152, None, ()), (2304, 768, None, ()), (1152, 768, "gelu", ())),
    32760: (
        (1536, 1536, None, ()),
        (4608, 1536, None, ()),
        (8960, 1536, None, (Step("add", "row"), Step("gelu_tanh"))),
        (1536, 8960, None, ()),
    ),
}
LARGE_TILES = {"128x256", "256x128", "128x192", "192x192", "64x256", "128x128", "64x192", "192x128"}


def in_models():
    """Those products with the large tiles that the tensor memory accelerator copies."""
    target, jobs = parse_target("cuda -arch=sm_90a"), []
    for m, products_of_rows in IN_MODELS.items():
        for n, k, gate, steps in products_of_rows:
            problem = GemmProblem(m, n, "float16", steps, k=k, gate=gate)
            jobs += [("gemm", problem, c) for c in legal_configs(problem, target) if c in MEASURED and c.tma]
    return [job for job in jobs if f"{job[2].block_m}x{job[2].block_n}" in LARGE_TILES and job[2].splits == 1]


# (m, n, k, steps) where cuBLAS was ahead, or a last wave of tiles was half empty.
BEHIND = (
    (9712, 768, 3072, BIAS_GELU[:1]),
    (9712, 768, 768, BIAS_GELU[:1]),
    (8000, 192, 6288, BIAS_GELU[:1]),
    (4096, 30000, 128, ()),
    (4096, 32, 1024, ()),
    (8192, 32, 1152, BIAS_GELU[:1]),
    (6272, 384, 768, ()),
    (6272, 384, 384, ()),
    (6272, 384, 1536, ()),
    (6272, 1152, 384, ()),
    (9696, 768, 256, BIAS_GELU[:1]),
    (4096, 640, 640, BIAS_GELU[:1]),
    (7992, 512, 1024, ()),
    (4096, 896, 896, ()),
    (4096, 896, 4864, ()),
    (4096, 960, 960, ()),
    (4096, 960, 2560, ()),
    (4096, 1600, 960, ()),
    (4096, 1920, 640, ()),
    (4096, 5632, 2048, ()),
    (12544, 192, 192, ()),
    (12544, 192, 768, ()),
    (12544, 576, 192, ()),
    (32760, 1536, 64, BIAS_GELU[:1]),
    (50176, 96, 96, ()),
    (50176, 288, 96, ()),
    (2048, 1152, 1152, ()),
    (2048, 3456, 1152, ()),
    (2048, 5632, 2048, ()),
    (1024, 6912, 1152, ()),
    (32768, 32000, 1024, ()),
)


def behind():
    """Those products with the six configurations that are predicted to be the fastest."""
    target, jobs = parse_target("cuda -arch=sm_90a"), []
    for m, n, k, steps in BEHIND:
        problem = GemmProblem(m, n, "float16", steps, k=k)
        configs = [c for c in gemm_cuda.configs(problem, target) if c in MEASURED]
        jobs += [("gemm", problem, config) for config in configs[:6]]
    return jobs


SUITES = {
    "behind": behind,
    "in_models": in_models,
    "ending_rows": ending_rows,
    "widths": widths,
    "clusters": clusters,
    "sm_80_widths": sm_80_widths,
    "hopper_few": hopper_few,
    "hopper_some": hopper_some,
    "hopper_many": hopper_many,
    "deep": lambda: products([128], BERT, DEEP) + products([512], BERT, DEEP_SOME),
    "whole_k": lambda: products([128], BERT[::2], [c for c in DEEP if (c.block_m, c.block_n, c.splits) == (64, 64, 1)]),
    "huge": lambda: (
        products([4096], LLAMA[:2], MANY_ROWS[2:9:2]) + products([32768], [BERT[0], BERT[2]], MANY_ROWS[2:9:2])
    ),
    "norms": norms,
    "decoding": decoding,
    "adapters": adapters,
    "few": lambda: products([128], BERT, FEW_ROWS),
    "some": lambda: products([512], BERT, SOME_ROWS),
    "many": lambda: products([2048], BERT, MANY_ROWS) + products([4096], BERT[2:], MANY_ROWS),
}
