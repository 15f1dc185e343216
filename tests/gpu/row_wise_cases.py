"""The cases of the CUDA row-wise kernel: decoding with 1 to 16 queries, whole lists and split ones."""

from attention_cases import Case, packed_views, problem

from tir_kernels.attention.problem import Layouts
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.row_wise.geometry import RowWiseConfig
from tir_kernels.target import parse_target

DEFAULT = RowWiseConfig(4, 3)
EVERY_CONFIG = [RowWiseConfig(warps, stages) for warps in (2, 4, 8) for stages in (2, 3, 4)]


def row_wise_cases() -> list[Case]:
    cases = [Case(problem(1, 4096, dim=128, heads=4), config, "random") for config in EVERY_CONFIG]
    cases += [Case(problem(3, 331, dim=64), config, "random") for config in EVERY_CONFIG]
    for dim in (8, 16, 32, 40, 80, 96, 192, 256):
        cases.append(Case(problem(2, 700, dim=dim), RowWiseConfig(4, 2), "random"))
    for dim, v_dim in ((64, 128), (128, 64), (96, 40), (8, 256)):
        cases.append(Case(problem(1, 700, dim=dim, v_dim=v_dim), DEFAULT, "full"))
    cases += [Case(problem(n, m), DEFAULT, "random") for n, m in ((1, 1), (1, 16), (16, 17), (7, 1025), (16, 2048))]
    masks = ("full", "causal", "dilated", "strided", "document", "empty-rows", "one-element")
    for dtype in ("float16", "bfloat16"):
        cases += [Case(problem(9, 513, batch=2, dtype=dtype), DEFAULT, mask) for mask in masks]
    cases.append(Case(problem(16, 4096, dim=128), DEFAULT, "causal-bottom-right"))
    for q_len, heads, kv_heads in ((1, 8, 1), (1, 32, 8), (5, 6, 2), (16, 8, 2), (3, 24, 1)):
        decoding = problem(q_len, 2048, dim=128, heads=heads, kv_heads=kv_heads, dtype="bfloat16")
        cases += [Case(decoding, DEFAULT, "random"), Case(decoding, DEFAULT, "random/per-head")]
    cases.append(Case(problem(4, 1500, batch=3, heads=6, kv_heads=2), DEFAULT, "random/per-batch-head"))
    cases.append(Case(problem(1, 32768, batch=2, dim=128, heads=8, kv_heads=2), DEFAULT, "random/per-batch"))
    full, biases = (2, 4, 5, 1100), ("normal", "infinite", "lowest")
    for shape in (full, (1, 4, 5, 1100), (2, 1, 1, 1100), (1, 1, 5, 1)):
        cases += [Case(_with_bias(full, shape, "float32"), DEFAULT, "random", bias) for bias in biases]
    cases += [Case(_with_bias(full, full, dtype), DEFAULT, "random", "infinite") for dtype in ("float16", "bfloat16")]
    packed, mixed = Layouts(*["bshd"] * 4), Layouts("bshd", "bhsd", "bshd", "bhsd")
    gqa = dict(batch=2, heads=4, kv_heads=2)
    cases += [Case(problem(3, 1025, layouts=x, **gqa), DEFAULT, "random") for x in (packed, mixed)]
    cases.append(Case(problem(16, 16, layouts=packed_views(2, 16, 4, 2, 64), **gqa), DEFAULT, "causal"))
    cases += [Case(problem(3, 900, scale=scale), DEFAULT, "causal-bottom-right") for scale in (-0.2, 0.0, 1.0)]
    cases.append(Case(problem(3, 900, heads=4, kv_heads=2, gives_lse=True), DEFAULT, "empty-rows-far"))
    cases.append(Case(problem(1, 32768, dim=128, gives_lse=True), DEFAULT, "random"))
    sink = dict(sink_dtype="float32", gives_lse=True)
    cases += [Case(problem(3, 331, heads=4, kv_heads=2, **sink), config, "random") for config in EVERY_CONFIG]
    cases += [Case(problem(1, 8192, dim=128, heads=4, **sink), config, "random") for config in EVERY_CONFIG[:3]]
    gpt_oss = dict(heads=64, kv_heads=8, dtype="bfloat16", sink_dtype="bfloat16")
    cases += [Case(problem(n, 2048, **gpt_oss), DEFAULT, "causal-bottom-right") for n in (1, 5)]
    with_bias = dict(batch=2, heads=4, kv_heads=2, bias_shape=full, **sink)
    cases += [Case(problem(5, 1100, dim=128, **with_bias), DEFAULT, "random", bias) for bias in biases]
    cases.append(Case(problem(4, 513, scale=-0.2, **sink), DEFAULT, "empty-rows"))
    capped = dict(dim=128, scale=1.0, softcap=50.0, heads=4, kv_heads=2)
    cases += [
        Case(problem(3, 1025, dtype=d, **capped), DEFAULT, "causal-bottom-right") for d in ("float16", "bfloat16")
    ]
    cases.append(Case(problem(1, 8192, sink_dtype="float32", gives_lse=True, **capped), DEFAULT, "random"))
    with_bias = problem(5, 1100, batch=2, bias_shape=full, **capped)
    cases += [Case(with_bias, DEFAULT, "random", bias) for bias in biases]
    # Legal on an H200, whose shared memory is the largest of those that are compiled for.
    target = parse_target("cuda -arch=sm_90a")
    legal = [case for case in cases if case.config in row_wise_cuda.configs(case.problem, target)]
    return list(dict.fromkeys(legal))


def _with_bias(full, shape, bias_dtype):
    batch, heads, q_len, kv_len = full
    rest = dict(dim=128, batch=batch, heads=heads, kv_heads=heads // 2)
    return problem(q_len, kv_len, bias_shape=shape, bias_dtype=bias_dtype, **rest)
