"""The CUDA attention cases that the GPU check runs, the manifest records and the CPU-only tests compile: one list.

A case is a problem, a configuration and a mask.  Only problem and configuration decide the generated source.
"""

import hashlib
import re
from dataclasses import dataclass, replace

import numpy as np

from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.warp_specialized import kernel as specialized
from tir_kernels.masks.block_sparse import BlockSparseMask

DEFAULT = BlockWiseConfig(64, 64, 4, 2)


def dtype_label(problem) -> str:
    """The dtype, in float32 with its mode: "float32-ieee"."""
    return f"{problem.dtype}-{problem.float32}" if problem.dtype == "float32" else problem.dtype


@dataclass(frozen=True)
class Case:
    """`bias` is None, "normal", "infinite" (some rows hold only -inf) or "lowest" (some rows hold only finfo.min)."""

    problem: AttentionProblem
    config: BlockWiseConfig | row_wise_cuda.Config | specialized.Config
    mask: str
    bias: str | None = None

    @property
    def template(self):
        return next(t for t in (block_wise_cuda, row_wise_cuda, specialized) if isinstance(self.config, t.Config))

    @property
    def arch(self) -> str | None:
        """The only architecture whose code has the configuration's instructions, where there is only one."""
        only_hopper = self.template is specialized or getattr(self.config, "warpgroup", False)
        return "sm_90a" if only_hopper else None

    @property
    def label(self) -> str:
        p = self.problem
        heads = f"{p.q_heads}" if p.q_heads == p.kv_heads else f"{p.q_heads}/{p.kv_heads}"
        dims = f"{p.head_dim}" if p.head_dim == p.v_head_dim else f"{p.head_dim}/{p.v_head_dim}"
        text = f"{self.mask} b{p.batch} h{heads} {p.q_len}x{p.kv_len} d{dims} {dtype_label(p)} scale {p.scale:.4g}"
        text += f" | {self.config.label}"
        if self.bias:
            text += f" | bias {self.bias} {p.bias_dtype} {'x'.join(map(str, p.bias_shape))}"
        if p.layouts != Layouts():
            text += f" | layouts {' '.join(map(str, p.layouts))}"
        text += " | continues" * p.continues + " | lse" * p.gives_lse
        text += f" | key counts {p.key_counts}" * p.has_key_count
        text += f" | sink {p.sink_dtype}" if p.sink_dtype else ""
        text += f" | softcap {p.softcap:g}" if p.softcap else ""
        return text

    def block_sparse_mask(self) -> BlockSparseMask:
        """What the kernel computes: all of `keep`, or, where it continues, what `earlier` leaves."""
        keep = self.keep() & ~self.earlier() if self.problem.continues else self.keep()
        block = self.config.block_m, self.config.block_n
        return BlockSparseMask.from_dense(keep, block, self.config.token_stride)

    def earlier(self) -> np.ndarray:
        """The part of `keep` whose result a continuing kernel is given: near elements, and all of some rows."""
        i, j = np.arange(self.problem.q_len)[:, None], np.arange(self.problem.kv_len)
        return self.keep() & ((abs(i - j) < 20) | (i % 70 < 5))

    def keep(self) -> np.ndarray:
        """Boolean (q_len, kv_len), (heads, …) or (batch, heads, …)."""
        p = self.problem
        shape = {"per-head": (p.q_heads,), "per-batch": (p.batch, 1), "per-batch-head": (p.batch, p.q_heads)}
        name, _, spread = self.mask.partition("/")
        leading = shape.get(spread, ())
        masks = [dense_mask(name, p.q_len, p.kv_len, seed) for seed in range(int(np.prod(leading, dtype=int)))]
        return np.stack(masks).reshape(*leading, p.q_len, p.kv_len)


def dense_mask(name: str, q_len: int, kv_len: int, seed: int = 0) -> np.ndarray:
    """Boolean (q_len, kv_len), by a formula independent of the project's mask library."""
    rng = np.random.default_rng(seed)
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    window = abs(i - j) <= 32 + 8 * seed
    some = (i < 20) | (j < 20)
    blocks = rng.random((-(-q_len // 64), -(-kv_len // 64))) < 0.1
    fill = np.repeat(np.repeat(blocks, 64, axis=0), 64, axis=1)[:q_len, :kv_len]
    empty_rows = (i % 50 < 3) | ((i >= 64) & (i < 192))
    formulas = {
        "full": lambda: (i >= 0) & (j >= 0),
        "causal": lambda: j <= i,
        "causal-bottom-right": lambda: j <= i + kv_len - q_len,
        "window": lambda: window,
        "dilated": lambda: (abs(i - j) <= 128) & ((i - j) % 4 == 0),
        "longformer": lambda: window | some,
        "bigbird": lambda: window | some | fill,
        "strided": lambda: (j <= i) & ((i - j < 32) | ((i - j) % 32 == 0)),
        "prefix": lambda: (j <= i) | (j < 77),
        "document": lambda: (i // 45 == j // 45) & (j <= i),
        "random": lambda: rng.random((q_len, kv_len)) < 0.3,
        "empty-rows": lambda: window & ~empty_rows,
        "empty-rows-far": lambda: (rng.random((q_len, kv_len)) < 0.5) & ~empty_rows & (j > i * 5),
        "one-element": lambda: (i == q_len // 2) & (j == kv_len - 1),
    }
    return np.broadcast_to(formulas[name](), (q_len, kv_len)).copy()


def problem(q_len, kv_len=None, dim=64, v_dim=None, batch=1, heads=2, kv_heads=None, dtype="float16", **rest):
    rest.setdefault("scale", dim**-0.5)
    return AttentionProblem(batch, heads, kv_heads or heads, q_len, kv_len or q_len, dim, v_dim or dim, dtype, **rest)


def _all_cases() -> list[Case]:
    every_config = [
        BlockWiseConfig(m, n, w, s) for m, w in block_wise_cuda.ROWS_AND_WARPS for n in (32, 64, 128) for s in (1, 2, 3)
    ]
    cases = [
        Case(problem(384), config, "bigbird") for config in every_config if config != BlockWiseConfig(128, 128, 4, 1)
    ]
    cases += [Case(problem(257, 331), config, "random") for config in every_config]
    for dim in (8, 16, 32, 40, 80, 96, 128, 192, 256):
        for config in (
            DEFAULT,
            BlockWiseConfig(64, 32, 4, 1),
            BlockWiseConfig(128, 32, 4, 3),
            BlockWiseConfig(128, 64, 8, 2),
            BlockWiseConfig(32, 32, 2, 2),
            BlockWiseConfig(64, 32, 2, 2),
        ):
            cases.append(Case(problem(257, dim=dim), config, "causal"))
        cases.append(Case(problem(257, dim=dim, dtype="bfloat16"), DEFAULT, "causal"))
    cases += [
        Case(problem(n, m), DEFAULT, "random") for n, m in ((97, 97), (113, 203), (1023, 1023), (1025, 64), (1, 300))
    ]
    masks = (
        "full",
        "causal",
        "window",
        "dilated",
        "longformer",
        "strided",
        "prefix",
        "document",
        "empty-rows",
        "one-element",
    )
    cases += [Case(problem(512, batch=2, dtype=dtype), DEFAULT, m) for m in masks for dtype in ("float16", "bfloat16")]
    cases.append(Case(problem(200, 512), DEFAULT, "causal-bottom-right"))
    cases += [
        Case(problem(300, dim=d, v_dim=v), DEFAULT, "window") for d, v in ((64, 128), (128, 64), (96, 40), (32, 256))
    ]
    for config in (DEFAULT, BlockWiseConfig(128, 64, 8, 1)):
        cases.append(Case(problem(300, batch=2, heads=8, kv_heads=2), config, "bigbird/per-head"))
        cases.append(
            Case(problem(300, batch=3, heads=6, kv_heads=1, dtype="bfloat16"), config, "window/per-batch-head")
        )
        cases.append(Case(problem(300, batch=3), config, "bigbird/per-batch"))
    full, biases = (2, 3, 203, 331), ("normal", "infinite", "lowest")
    for config in (DEFAULT, BlockWiseConfig(128, 32, 8, 3), BlockWiseConfig(64, 128, 4, 1)):
        for shape in (full, (1, 3, 203, 331), (2, 1, 1, 331), (1, 1, 203, 1)):
            cases += [Case(_with_bias(full, shape, "float32"), config, "bigbird", bias) for bias in biases]
    cases += [Case(_with_bias(full, full, dtype), DEFAULT, "random", "infinite") for dtype in ("float16", "bfloat16")]
    packed = Layouts("bshd", "bshd", "bshd", "bshd")
    mixed = Layouts("bshd", "bhsd", "bshd", "bhsd")
    outermost_tokens = Layouts("sbhd", "hbsd", "shbd", "sbhd")
    cases += [
        Case(problem(203, 257, batch=2, heads=4, kv_heads=2, layouts=x), DEFAULT, "bigbird")
        for x in (packed, mixed, outermost_tokens)
    ]
    for config in (DEFAULT, BlockWiseConfig(128, 32, 4, 2)):
        viewed = problem(203, batch=2, heads=4, kv_heads=2, dim=80, layouts=packed_views(2, 203, 4, 2, 80))
        cases.append(Case(viewed, config, "bigbird"))
    # Few long block rows: split among CTAs and merged.
    small = BlockWiseConfig(64, 32, 4, 2)
    cases += [Case(problem(200, 1500, dim=128), config, "longformer") for config in every_config if config.stages == 2]
    cases += [Case(problem(130, 2500, dim=d), small, "empty-rows-far") for d in (32, 64, 80, 256)]
    cases.append(Case(problem(1024), small, "longformer"))
    split = problem(100, 3000, batch=2, heads=6, kv_heads=2, dtype="bfloat16", layouts=mixed)
    cases.append(Case(split, DEFAULT, "longformer/per-batch-head"))
    cases += [Case(_with_bias((1, 2, 90, 2000), (1, 2, 90, 1), "float32"), DEFAULT, "random", bias) for bias in biases]
    cases += [Case(problem(203, scale=scale), DEFAULT, "causal") for scale in (-0.2, 0.0, 1.0)]
    # Tokens taken apart, results continued, log-sum-exp given.
    for config in every_config:
        if config.stages == 2:
            apart = replace(config, token_stride=32)
            cases.append(Case(problem(1024, gives_lse=True), replace(config, token_stride=2), "dilated"))
            cases.append(Case(problem(1024, continues=True), apart, "strided"))
            cases.append(Case(problem(515, 700, dim=128, gives_lse=True, continues=True), apart, "strided"))
    near = dict(dim=64, heads=4, kv_heads=2, dtype="bfloat16", layouts=packed, gives_lse=True)
    cases.append(Case(problem(300, 411, continues=True, **near), replace(DEFAULT, token_stride=32), "strided"))
    cases.append(Case(problem(100, 3000, continues=True, **near), DEFAULT, "longformer/per-head"))
    cases.append(Case(problem(300, scale=-0.2, continues=True, gives_lse=True), DEFAULT, "empty-rows"))
    with_bias = dict(bias_shape=(2, 3, 203, 331), continues=True, gives_lse=True)
    cases.append(Case(problem(203, 331, batch=2, heads=3, **with_bias), DEFAULT, "random", "normal"))
    cases += [*_warpgroup_cases(packed), *_specialized_cases(packed), *_sink_cases(every_config, packed)]
    cases += [*_softcap_cases(packed), *_key_count_cases(packed)]
    return list(dict.fromkeys(case for case in cases if _legal(case)))


def _sink_cases(every_config, packed) -> list[Case]:
    """Every tile, whole rows and split ones; what sinks meet at the end of a row: bias, parts, log-sum-exp."""
    sink = dict(sink_dtype="float32")
    warpgroups = [
        BlockWiseConfig(m, n, w, 2, warpgroup=True)
        for m, w in block_wise_cuda.WARPGROUP_ROWS_AND_WARPS
        for n in (32, 64, 128)
    ]
    cases = []
    for config in [*(config for config in every_config if config.stages == 2), *warpgroups]:
        cases.append(Case(problem(192, 331, gives_lse=True, **sink), config, "empty-rows"))
        cases.append(Case(problem(200, 1500, dim=128, dtype="bfloat16", gives_lse=True, **sink), config, "longformer"))
    for config in (DEFAULT, replace(DEFAULT, warpgroup=True)):
        apart = replace(config, token_stride=32)
        cases.append(Case(problem(515, 700, gives_lse=True, continues=True, **sink), apart, "strided"))
        cases.append(
            Case(problem(100, 3000, heads=4, kv_heads=2, continues=True, **sink), config, "longformer/per-head")
        )
        shape = (2, 3, 203, 331)
        given = problem(203, 331, batch=2, heads=3, bias_shape=shape, gives_lse=True, **sink)
        cases += [Case(given, config, "bigbird", bias) for bias in ("normal", "infinite", "lowest")]
    # As gpt-oss has it: 64 query heads on 8 of keys, 64 wide, windows and causality by turns.
    for mask in ("causal", "window"):
        given = problem(512, heads=64, kv_heads=8, dtype="bfloat16", layouts=packed, sink_dtype="bfloat16")
        cases.append(Case(given, DEFAULT, mask))
    cases += [Case(problem(257, dim=dim, sink_dtype="float16"), DEFAULT, "causal") for dim in (8, 40, 80, 192, 256)]
    cases.append(Case(problem(203, scale=-0.2, gives_lse=True, **sink), DEFAULT, "causal"))
    return cases


def _softcap_cases(packed) -> list[Case]:
    """Both products of the block-wise kernel and the warp-specialized one: causal, bias, split, parts, a sink."""
    configs = [(64, DEFAULT), (128, BlockWiseConfig(128, 64, 8, 2)), (64, replace(DEFAULT, warpgroup=True))]
    configs += [(128, specialized.Config(128, 128, 2)), (64, specialized.Config(192, 128, 2))]
    shape = (2, 3, 203, 331)
    cases = []
    for dim, config in configs:
        capped = dict(dim=dim, scale=1.0, softcap=50.0)
        gemma = dict(heads=4, kv_heads=2, dtype="bfloat16", layouts=packed)
        cases += [Case(problem(512, **gemma, **capped), config, mask) for mask in ("causal", "window")]
        cases.append(Case(problem(192, 331, gives_lse=True, **capped), config, "empty-rows"))
        cases.append(Case(problem(200, 1500, gives_lse=True, sink_dtype="float32", **capped), config, "longformer"))
        cases.append(Case(problem(100, 3000, heads=4, continues=True, **capped), config, "longformer/per-head"))
        with_bias = problem(203, 331, batch=2, heads=3, bias_shape=shape, **capped)
        cases += [Case(with_bias, config, "bigbird", bias) for bias in ("normal", "lowest")]
        cases.append(Case(problem(203, dim=dim, scale=-0.5, softcap=2.0), config, "causal"))
    # Gemma 2 has heads of 256.
    cases.append(Case(problem(300, dim=256, heads=2, kv_heads=1, dtype="bfloat16", softcap=50.0), DEFAULT, "causal"))
    return cases


def _key_count_cases(packed) -> list[Case]:
    """Every kind of tile; whole, ragged and split rows; beside a bias, a sink, a softcap and tokens apart."""
    tiles = [DEFAULT, BlockWiseConfig(128, 32, 8, 3), BlockWiseConfig(64, 32, 4, 1), BlockWiseConfig(16, 64, 1, 2)]
    tiles += [replace(DEFAULT, warpgroup=True), BlockWiseConfig(128, 128, 8, 2, warpgroup=True)]
    tiles += [specialized.Config(*tile) for tile in ((128, 128, 2), (192, 128, 2), (64, 64, 2), (128, 64, 3))]
    cases = []
    for config in tiles:
        dim = 128 if config.block_m == 128 else 64
        given = dict(batch=2, heads=3, dim=dim, key_counts=2)
        cases += [Case(problem(333, **given), config, mask) for mask in ("full", "window", "empty-rows")]
        cases.append(Case(problem(512, dim=dim, key_counts=1, dtype="bfloat16"), config, "full"))
        more = dict(gives_lse=True, sink_dtype="float32", softcap=20.0)
        cases.append(Case(problem(200, 1500, dim=dim, key_counts=1, **more), config, "longformer"))
        biased = problem(203, 331, batch=2, heads=3, dim=dim, key_counts=2, bias_shape=(2, 3, 203, 331))
        cases.append(Case(biased, config, "bigbird", "normal"))
        viewed = dict(heads=4, kv_heads=2, layouts=packed_views(2, 203, 4, 2, dim))
        cases.append(Case(problem(203, batch=2, dim=dim, key_counts=2, **viewed), config, "causal"))
    for config in (DEFAULT, replace(DEFAULT, warpgroup=True)):
        apart = replace(config, token_stride=32)
        cases.append(Case(problem(515, 700, continues=True, key_counts=1), apart, "strided"))
    cases += [Case(problem(300, dim=dim, key_counts=1), DEFAULT, "full") for dim in (8, 40, 80, 256)]
    for dim in (48, 80, 96, 256):
        config = specialized.Config(*((64, 64, 2) if dim == 256 else (128, 64, 2)))
        cases.append(Case(problem(333, dim=dim, key_counts=1), config, "full"))
    for mode in ("ieee", "tf32"):
        config = BlockWiseConfig(64, 32, 4, 2)
        cases.append(Case(problem(300, dtype="float32", float32=mode, key_counts=1), config, "full"))
    return cases


def _warpgroup_cases(packed) -> list[Case]:
    every_config = [
        BlockWiseConfig(m, n, w, s, warpgroup=True)
        for m, w in block_wise_cuda.WARPGROUP_ROWS_AND_WARPS
        for n in (32, 64, 128)
        for s in (1, 2, 3)
    ]
    cases = [Case(problem(384), config, "bigbird") for config in every_config]
    cases += [Case(problem(257, 331, dim=128, dtype="bfloat16"), config, "random") for config in every_config]
    for config in every_config:
        if config.stages == 2:
            cases.append(Case(problem(200, 1500, dim=128), config, "longformer"))
            cases.append(Case(problem(515, 700, dim=128, gives_lse=True), replace(config, token_stride=2), "dilated"))
            cases.append(Case(problem(1024, continues=True), replace(config, token_stride=32), "strided"))
            cases.append(Case(problem(300, batch=3, heads=6, kv_heads=1), config, "window/per-batch-head"))
    default = replace(DEFAULT, warpgroup=True)
    cases += [Case(problem(300, dim=d, v_dim=v), default, "causal") for d, v in ((64, 128), (256, 64), (192, 256))]
    cases += [Case(problem(512, batch=2), default, m) for m in ("full", "empty-rows", "one-element")]
    cases.append(Case(problem(203, 257, batch=2, heads=4, kv_heads=2, layouts=packed), default, "bigbird"))
    cases += [
        Case(_with_bias((2, 3, 203, 331), (2, 3, 203, 331), "float32"), default, "bigbird", bias)
        for bias in ("normal", "infinite", "lowest")
    ]
    return cases


def _specialized_cases(packed) -> list[Case]:
    """Every tile; whole, ragged and split rows; empty rows, few items and many; what else an attention may have."""
    from tir_kernels.target import parse_target

    target, cases = parse_target("cuda -arch=sm_90a"), []
    for dim in (48, 64, 80, 96, 128, 256):
        for config in specialized.configs(problem(384, dim=dim), target):
            cases.append(Case(problem(384, dim=dim), config, "bigbird"))
            cases.append(Case(problem(257, 331, dim=dim, dtype="bfloat16"), config, "random"))
            cases.append(Case(problem(200, 1500, dim=dim, gives_lse=True), config, "longformer"))
            cases.append(Case(problem(300, batch=3, heads=6, kv_heads=1, dim=dim), config, "window/per-batch-head"))
            if dim in (64, 80, 128):  # classes of tokens of one size, and of two
                near, far = replace(config, token_stride=2), replace(config, token_stride=32)
                cases.append(Case(problem(1024, dim=dim, heads=3, gives_lse=True), near, "dilated"))
                cases.append(Case(problem(515, 700, dim=dim, continues=True, gives_lse=True), far, "strided"))
    for config in (specialized.Config(128, 128, 2), specialized.Config(192, 128, 2)):
        dim = 128 if config.block_m == 128 else 64
        masks = ("full", "causal", "document", "empty-rows", "one-element", "dilated")
        cases += [
            Case(problem(512, dim=dim, batch=2, dtype=d), config, m) for m in masks for d in ("float16", "bfloat16")
        ]
        cases += [
            Case(problem(n, m, dim=dim), config, "random") for n, m in ((1, 300), (1025, 64), (40, 40), (129, 2049))
        ]
        cases += [Case(problem(n, dim=dim, heads=h), config, "causal") for n, h in ((2048, 9), (1000, 66), (4096, 1))]
        cases.append(Case(problem(130, 2500, dim=dim), config, "empty-rows-far"))
        cases += [Case(problem(203, dim=dim, scale=scale), config, "causal") for scale in (-0.2, 0.0, 1.0)]
        given = dict(batch=2, heads=4, kv_heads=2, dim=dim)
        cases += [
            Case(problem(203, 257, layouts=x, **given), config, "bigbird")
            for x in (packed, Layouts("bshd", "bhsd", "bshd", "bhsd"), Layouts("sbhd", "hbsd", "shbd", "sbhd"))
        ]
        cases.append(Case(problem(203, layouts=packed_views(2, 203, 4, 2, dim), **given), config, "bigbird"))
        repeated = Layouts(*(View(2 * 203 * 2 * dim, 0, 0, step, 2 * dim) for step in (dim, 0, 0)), "bshd")
        cases.append(Case(problem(203, batch=2, dim=dim, layouts=repeated), config, "bigbird"))
        cases.append(Case(problem(100, 3000, continues=True, gives_lse=True, **given), config, "longformer/per-head"))
        cases.append(Case(problem(515, 700, dim=dim, continues=True), config, "strided"))
        sink = dict(sink_dtype="float32", gives_lse=True)
        cases.append(Case(problem(192, 331, dim=dim, **sink), config, "empty-rows"))
        cases.append(Case(problem(200, 1500, dim=dim, **sink), config, "longformer"))
        apart = replace(config, token_stride=7)
        cases.append(Case(problem(203, layouts=packed_views(2, 203, 4, 2, dim), **given), apart, "dilated"))
        cases.append(Case(problem(600, 515, continues=True, **given, **sink), apart, "bigbird"))
        cases.append(Case(problem(515, 700, dim=dim, key_counts=1), apart, "strided"))
        cases.append(Case(problem(40, 2500, dim=dim, softcap=20.0), replace(config, token_stride=2), "empty-rows-far"))
        full = (2, 3, 203, 331)
        for shape in (full, (2, 1, 1, 331), (1, 1, 203, 1)):
            with_bias = problem(203, 331, batch=2, heads=3, dim=dim, bias_shape=shape)
            cases += [Case(with_bias, config, "bigbird", bias) for bias in ("normal", "infinite", "lowest")]
    small, large = specialized.Config(64, 64, 2), specialized.Config(128, 64, 2)
    for dim in (8, 24, 72, 88, 120, 200):  # between multiples of 16: the last columns of a tile are in no head
        given = dict(batch=2, heads=4, kv_heads=2, dim=dim)
        for config in (small, large):
            cases.append(Case(problem(257, 331, **given, dtype="bfloat16"), config, "random"))
            cases.append(Case(problem(203, layouts=packed_views(2, 203, 4, 2, dim), **given), config, "bigbird"))
        cases.append(Case(problem(100, 3000, continues=True, gives_lse=True, **given), small, "longformer/per-head"))
    cases += [Case(problem(1030, heads=40, dim=72), config, "full") for config in (small, large)]
    for d, v in ((64, 128), (192, 128), (192, 256), (32, 80), (72, 104), (40, 72)):
        cases.append(Case(problem(300, dim=d, v_dim=v), small, "causal"))
    for d, v in ((128, 80), (96, 64), (48, 256)):  # on several warpgroups: queries' and outputs' panels differ in width
        cases.append(Case(problem(1030, heads=40, dim=d, v_dim=v), large, "causal"))
    return cases


def packed_views(batch: int, length: int, heads: int, kv_heads: int, dim: int) -> Layouts:
    """q, k and v as one projection leaves them: (batch, length, heads + 2 * kv_heads, dim)."""
    token = (heads + 2 * kv_heads) * dim
    offsets = 0, heads * dim, (heads + kv_heads) * dim
    views = (View(batch * length * token, offset, length * token, dim, token) for offset in offsets)
    return Layouts(*views, "bshd")


def _with_bias(full, shape, bias_dtype):
    batch, heads, q_len, kv_len = full
    return problem(q_len, kv_len, batch=batch, heads=heads, bias_shape=shape, bias_dtype=bias_dtype)


def _legal(case: Case) -> bool:
    """On an A100, whose shared memory is the smaller, where its instructions do."""
    from tir_kernels.target import parse_target

    legal = case.template.configs(case.problem, parse_target(f"cuda -arch={case.arch or 'sm_80'}"))
    return (replace(case.config, token_stride=1) if case.template.TAKES_TOKEN_STRIDES else case.config) in legal


CASES = _all_cases()


def source_hash(source: str) -> str:
    """SHA-256 of the kernel's own CUDA text: without TVM's common header, helper functions in sorted order."""
    start = source.index('extern "C" __global__')
    helpers = re.findall(r"^__forceinline__ __device__.*?^}", source[:start], re.DOTALL | re.MULTILINE)
    return hashlib.sha256("\n".join(sorted(helpers) + [source[start:].strip()]).encode()).hexdigest()
