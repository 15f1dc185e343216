"""The cases of the CUDA matrix-product kernels: every tile, both layouts, ragged edges, steps, splits, norms.

Only problem and configuration decide the generated source.
"""

from dataclasses import dataclass, replace
from functools import partial

from attention_cases import dtype_label

from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm import gemm_norm as gemm_norm_cuda
from tir_kernels.fusion.gemm import gemv as gemv_cuda
from tir_kernels.fusion.gemm.finish.deferred_norm import statistics_operand
from tir_kernels.fusion.gemm.gemv import GemvConfig
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import TAILS, TILES, TMA_TILES, WARPGROUP_TILES, spills
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, legal
from tir_kernels.fusion.problem import ACTIVATIONS, GATE_COLUMNS, STATISTICS_COLUMNS, GemmProblem, Norm, Step
from tir_kernels.problems.steps_reference import ACTIVATIONS as ACTIVATION_FUNCTIONS
from tir_kernels.target import parse_target

BIAS, RESIDUAL, GATE = Step("add", "row"), Step("add", "matrix"), Step("multiply", "matrix")
GELU, SILU = Step("gelu"), Step("silu")
CLIP = Step("clip", value=0.5)


def step_label(step: Step) -> str:
    if step.norm is not None:
        return f"{step.kind}-{norm_label(step.norm)}"
    return step.kind + (f"-{step.operand}" if step.operand else "") + (f"-{step.value}" if step.value else "")


def norm_label(norm: Norm) -> str:
    return norm.kind + "-weight" * norm.weight + "-bias" * norm.bias


@dataclass(frozen=True)
class GemmCase:
    template: object
    problem: GemmProblem
    config: object

    @property
    def label(self) -> str:
        p = self.problem
        text = f"{self.template.NAME} {p.m}x{p.n}x{p.k} {p.w_layout} {dtype_label(p)}"
        if p.batch > 1:
            text = text.replace(f" {p.m}x", f" {p.batch}x{p.rows}x", 1) + f" {p.matrices} matrices"
        if p.a_norm is not None:
            text += f" of {norm_label(p.a_norm)}"
        if p.gate is not None:
            text += f" gate-{p.gate}" + "-bias" * p.gate_bias
        for step in p.steps:
            text += f" {step_label(step)}"
        if p.norm is not None:
            text += f" {norm_label(p.norm)}" + " sum" * p.keeps_sum
        return f"{text}{' statistics' * p.statistics} | {self.config.label}"

    @property
    def arch(self) -> str | None:
        """The only architecture that runs it, if there is one."""
        return "sm_90a" if getattr(self.config, "warpgroup", False) else None

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return [shape for shape, _ in self.problem.outputs]

    @property
    def out_dtypes(self) -> list[str]:
        return [dtype for _, dtype in self.problem.outputs]

    def make_inputs(self, seed: int) -> list:
        return make_inputs(self.problem, seed)

    def torch_sequence(self, *inputs) -> tuple:
        return torch_sequence(self.problem, *inputs)


def make_inputs(problem, seed: int) -> list:
    """Fresh random inputs on the GPU in argument order; weights scaled so that a product's elements are about one."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, device="cuda") for shape, _ in problem.inputs]
    tensors[1] *= problem.k**-0.5
    tensors = [x.to(getattr(torch, dtype)) for x, (_, dtype) in zip(tensors, problem.inputs)]
    if problem.row_norm is not None:
        place = 2 + statistics_operand(problem)
        matrix = 0 if problem.a_norm is not None else place - 1
        tensors[matrix] += 1  # a mean to take away
        tensors[place] = row_statistics(tensors[matrix])
    if problem.a_norm is not None and problem.a_norm.kind == "layer_norm":
        tensors[3][0] = tensors[1].float().sum(1 if problem.w_layout == "nk" else 0)
    return tensors


def row_statistics(x):
    """As `problem.py` defines them, in float32."""
    import torch

    parts = x.float().view(x.shape[0], -1, STATISTICS_COLUMNS)
    mean = parts.mean(2)
    return torch.stack([mean, (parts - mean[..., None]).square().sum(2)], 2)


def torch_sequence(problem, *inputs) -> tuple:
    """The unfused sequence in the inputs' dtype, norms and all: (out,), (out, out_sum) or (out, statistics)."""
    import torch

    a, w, *operands = inputs
    if problem.a_norm is not None:
        a, _ = normalized(problem.a_norm, a, []), operands.pop(0)
    if problem.batch > 1:
        a, w = a.view(-1, problem.matrices, problem.rows, problem.k), w.view(problem.matrices, -1, w.shape[-1])
    x = (a @ (w.mT if problem.w_layout == "nk" else w)).view(problem.m, problem.w_columns)
    if problem.gate is not None:
        x = x + operands.pop(0) if problem.gate_bias else x
        gate, value = x.view(problem.m, -1, 2, GATE_COLUMNS).unbind(2)
        x = (ACTIVATION_FUNCTIONS[problem.gate](torch, gate) * value).reshape(problem.m, problem.n)
    if problem.a_norm is not None and problem.a_norm.kind == "layer_norm":
        x = x + operands.pop(0)[1].to(x.dtype)
    return torch_rest(problem, x, *operands)


def normalized(norm: Norm, x, rest: list):
    """norm(x); its weight and bias are taken from the front of `rest`."""
    import torch.nn.functional as F

    weight = rest.pop(0) if norm.weight else None
    bias = rest.pop(0) if norm.bias else None
    if norm.kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)
    out = F.rms_norm(x, x.shape[-1:], weight, norm.eps)
    return out if bias is None else out + bias


def torch_rest(problem, x, *operands) -> tuple:
    """What follows the product `x`."""
    import torch

    functions = {kind: partial(function, torch) for kind, function in ACTIVATION_FUNCTIONS.items()}
    rest = list(operands)
    for step in problem.steps:
        if step.kind == "clip":
            x = x.clamp(-step.value, step.value)
        elif step.kind == "scale":
            x = x * step.value
        elif step.operand is None:
            x = functions[step.kind](x)
        elif step.norm is not None:
            y, _, columns = (rest.pop(0) for _ in range(3))
            x = x + normalized(replace(step.norm, weight=True, bias=True), y, list(columns.to(x.dtype)))
        else:
            other = rest.pop(0)[..., : problem.n]  # vectors may be longer than rows
            x = x + other if step.kind == "add" else x * other
    if problem.norm is None:
        return (x, row_statistics(x)) if getattr(problem, "statistics", False) else (x,)
    out = normalized(problem.norm, x, rest)
    return (out, x) if problem.keeps_sum else (out,)


def problem(m, n, k, dtype="float16", steps=(), **rest) -> GemmProblem:
    return GemmProblem(m, n, dtype, tuple(steps), k=k, **rest)


def gemm_cases() -> list[GemmCase]:
    """The cases of all matrix-product kernels."""
    limit = int(parse_target("cuda -arch=sm_90a").attrs["max_shared_memory_per_block"])
    cases = [(gemm_cuda, *case) for case in [*_products(), *_warpgroup_products(), *_tma_products()]]
    cases += [
        (gemm_cuda, *case)
        for case in [
            *_tail_products(),
            *_cluster_products(),
            *_batched_products(),
            *_gated_products(),
            *_ragged_products(),
        ]
    ]
    cases += [(gemm_cuda, *case) for case in [*_products_of_norms(), *_products_with_normed()]]
    cases += [(gemm_norm_cuda, *case) for case in [*_norms(), *_warpgroup_norms()]]
    cases = [(t, p, c) for t, p, c in cases if legal(GemmGeometry(p, c), limit) and not spills(c, p)]
    cases += [(gemv_cuda, *case) for case in _few_rows()]
    return list(dict.fromkeys(GemmCase(*case) for case in cases))


def _products():
    cases = []
    for block_m, block_n, warps_m, warps_n in TILES:
        for w_layout in ("nk", "kn"):
            aligned, ragged = (GemmConfig(block_m, block_n, k, warps_m, warps_n, s) for k, s in ((64, 3), (32, 4)))
            cases.append((problem(512, 768, 256, steps=(BIAS, GELU), w_layout=w_layout), aligned))
            cases.append((problem(259, 520, 328, steps=(BIAS, RESIDUAL), w_layout=w_layout), ragged))
    middle = GemmConfig(64, 64, 32, 2, 2, 3)
    for dtype in ("float16", "bfloat16"):
        cases += [(problem(100, 200, 72, dtype, (BIAS, Step(kind))), middle) for kind in ACTIVATIONS]
        cases += [
            (problem(m, 264, 520, dtype, (BIAS, SILU, GATE, RESIDUAL), w_layout=w_layout), middle)
            for m in (1, 1025)
            for w_layout in ("nk", "kn")
        ]
    cases.append((problem(100, 200, 72, steps=(Step("scale", value=0.125), Step("multiply", "row"))), middle))
    cases.append((problem(100, 200, 72, steps=(RESIDUAL, CLIP)), middle))
    cases += [(problem(96, 128, k), GemmConfig(32, 64, 64, 1, 4, s)) for k in (8, 1000) for s in (2, 5, 8)]
    cases.append((problem(128, 3072, 768, steps=(BIAS, GELU)), GemmConfig(64, 64, 64, 2, 2, 12)))
    for splits in (2, 4, 8):
        for block_m, block_n, warps_m, warps_n in ((16, 64, 1, 4), (64, 64, 2, 2), (128, 128, 2, 4)):
            config = GemmConfig(block_m, block_n, 64, warps_m, warps_n, 3, splits)
            cases.append((problem(128, 768, 3072, steps=(BIAS, RESIDUAL)), config))
            cases.append((problem(33, 520, 2056, "bfloat16", (BIAS, GELU), w_layout="kn"), config))
    return cases


def warpgroup_config(*sizes, **rest) -> GemmConfig:
    return GemmConfig(*sizes, warpgroup=True, **rest)


def _warpgroup_products():
    cases = []
    for block_m, block_n, warps_m, warps_n in WARPGROUP_TILES:
        for w_layout in ("nk", "kn"):
            aligned, ragged = (warpgroup_config(block_m, block_n, 64, warps_m, warps_n, s) for s in (3, 4))
            cases.append((problem(512, 768, 256, steps=(BIAS, GELU), w_layout=w_layout), aligned))
            cases.append((problem(259, 520, 328, "bfloat16", (BIAS, RESIDUAL), w_layout=w_layout), ragged))
    small, large = (64, 128, 64, 4, 1, 4), (128, 128, 64, 8, 1, 3)
    for sizes in (small, large):
        config = warpgroup_config(*sizes)
        cases.append((problem(1025, 264, 520, steps=(BIAS, SILU, GATE, RESIDUAL)), config))
        cases += [(problem(m, 128, k), config) for m in (1, 96) for k in (8, 64, 1000)]
        for splits in (2, 4, 6):
            split = warpgroup_config(*sizes, splits)
            cases.append((problem(128, 768, 3072, steps=(BIAS, RESIDUAL)), split))
            cases.append((problem(33, 520, 2056, "bfloat16", (BIAS, GELU), w_layout="kn"), split))
    cases.append((problem(128, 3072, 768, steps=(BIAS, GELU)), warpgroup_config(64, 64, 64, 4, 1, 12)))
    return cases


def _tma_products():
    cases = []
    for block_m, block_n, warps_m, warps_n, sets in TMA_TILES:
        for w_layout in ("nk", "kn"):
            shallow, deep = (
                warpgroup_config(block_m, block_n, 64, warps_m, warps_n, stages, tma=True, sets=sets)
                for stages in (3, 4)
            )
            # Several tiles for each CTA, and more blocks of k than stages.
            cases.append((problem(2050, 4104, 520, "bfloat16", (BIAS, RESIDUAL), w_layout=w_layout), shallow))
            cases.append((problem(2048, 4096, 1024, steps=(BIAS, GELU), w_layout=w_layout), deep))
    for sizes, sets in (((64, 64, 64, 4, 1, 12), 1), ((128, 128, 64, 4, 1, 6), 2), ((64, 256, 64, 4, 2, 5), 1)):
        config = warpgroup_config(*sizes, tma=True, sets=sets)
        cases.append((problem(1025, 264, 520, steps=(BIAS, SILU, GATE, RESIDUAL)), config))
        cases += [(problem(m, 128, k), config) for m in (1, 96) for k in (8, 1000)]
    return cases


def _tail_products():
    """Narrower tiles after whole waves: one wave and more, whole tiles and ragged ones, every width."""
    cases = []
    for sizes in ((128, 256, 64, 8, 1, 4), (128, 192, 64, 8, 1, 5), (128, 160, 64, 8, 1, 6)):
        configs = [tma_config(*sizes, tail_n=n) for n in TAILS[GemmConfig(*sizes).tile]]
        cases += [(problem(9712, 768, 768, steps=(BIAS, GELU)), config) for config in configs]
        cases += [(problem(8499, 1288, 520, "bfloat16", (BIAS, RESIDUAL)), config) for config in configs]
    for sizes in ((192, 192, 64, 12, 1, 4), (192, 128, 64, 12, 1, 4)):
        configs = [tma_config(*sizes, tail_n=n) for n in TAILS[GemmConfig(*sizes).tile]]
        cases += [(problem(m, n, 520, "bfloat16", (BIAS,)), c) for m, n in ((9712, 768), (8499, 1288)) for c in configs]
    wide, narrow = (tma_config(128, 256, 64, 8, 1, 4, tail_n=n) for n in (192, 64))
    return cases + [
        (problem(8499, 1288, 520, steps=(BIAS, RESIDUAL), w_layout="kn"), wide),
        (problem(4096, 1536, 768, gate="silu", gate_bias=True), narrow),
        (problem(8499, 1287, 520, steps=(BIAS,)), wide),
    ]


def _cluster_products():
    """Whole tiles and ragged ones, the last split shorter than the others."""
    cases = []
    small = ((64, 64, 64, 4, 1, 5, 2), (64, 64, 64, 4, 1, 5, 4), (64, 128, 64, 4, 1, 6, 2))
    large = ((128, 128, 64, 8, 1, 6, 2), (128, 192, 64, 8, 1, 5, 2))
    for sizes in (*small, *large):
        config = warpgroup_config(*sizes, tma=True)
        cases.append((problem(128, 768, 3072, steps=(BIAS, RESIDUAL)), config))
        for w_layout in ("nk", "kn"):
            cases.append((problem(259, 520, 1416, "bfloat16", (BIAS, GELU), w_layout=w_layout), config))
    return cases


def _batched_products():
    """Products of heads: a matrix for each part of the rows, or the same few in turn; edges inside of w and a."""

    def batch(parts, rows, n, k, matrices, dtype="float16", steps=(), **rest):
        return problem(parts * rows, n, k, dtype, steps, batch=parts, matrices=matrices, **rest)

    small, large, wide = (64, 64, 64, 4, 1, 6), (128, 128, 64, 8, 1, 4), (64, 256, 64, 4, 1, 4)
    cases = []
    for sizes, sets in ((small, 1), (small, 2), (large, 1), (wide, 2)):
        config = tma_config(*sizes, sets=sets)
        cases += [
            (batch(24, 512, 512, 64, 12), config),
            (batch(6, 200, 328, 72, 6, "bfloat16", (BIAS, RESIDUAL)), config),
            (batch(6, 200, 72, 320, 3, w_layout="kn"), config),
            (batch(14, 300, 14, 64, 14), config),
        ]
    for config in (
        GemmConfig(64, 64, 64, 2, 2, 4),
        GemmConfig(16, 64, 64, 1, 4, 6),
        GemmConfig(128, 128, 32, 2, 2, 4),
        GemmConfig(64, 64, 64, 2, 2, 4, 2),
        warpgroup_config(64, 64, 64, 4, 1, 4),
        warpgroup_config(128, 128, 64, 8, 1, 4, 2),
    ):
        cases += [
            (batch(24, 256, 264, 264, 12), config),
            (batch(3, 199, 328, 320, 3, "bfloat16", (BIAS, GELU), w_layout="kn"), config),
            (batch(6, 199, 45, 72, 2, "bfloat16", (BIAS, GELU)), config),
        ]
    return cases


def _gated_products():
    """f(gate) * values of one product: each kernel and activation, whole tiles and ragged ones."""

    def gated(m, n, k, gate, dtype="float16", steps=(), **rest):
        return problem(m, n, k, dtype, steps, gate=gate, **rest)

    tma = [
        tma_config(*sizes, sets=sets)
        for sizes, sets in (
            ((64, 64, 64, 4, 1, 6), 1),
            ((64, 256, 64, 4, 1, 4), 2),
            ((128, 128, 64, 4, 1, 6), 2),
            ((128, 256, 64, 8, 1, 4), 1),
            ((256, 128, 64, 8, 1, 4), 1),
            ((128, 192, 64, 8, 1, 5), 1),
            ((128, 112, 64, 4, 1, 6), 2),
        )
    ]
    others = [
        GemmConfig(64, 64, 64, 2, 2, 4),
        GemmConfig(16, 64, 64, 1, 4, 6),
        GemmConfig(128, 128, 32, 2, 2, 4),
        GemmConfig(64, 64, 64, 2, 2, 4, 2),
        warpgroup_config(64, 128, 64, 4, 1, 4),
        warpgroup_config(128, 256, 64, 8, 1, 4),
    ]
    cases = [(gated(1000, 1152, 768, "gelu"), config) for config in tma]
    cases += [(gated(259, 264, 328, "silu", "bfloat16", (RESIDUAL,), gate_bias=True), c) for c in [*tma[:4], *others]]
    cases += [(gated(512, 520, 256, "gelu", w_layout="kn", gate_bias=True), c) for c in [tma[0], tma[3], *others]]
    return cases + [(gated(100, 200, 72, kind, gate_bias=True), others[0]) for kind in ACTIVATIONS]


def _ragged_products():
    """Rows of the result that do not begin at multiples of 16 bytes, as those of vocabularies."""
    tma = [tma_config(64, 64, 64, 4, 1, 6), tma_config(64, 256, 64, 4, 1, 4, sets=2), tma_config(256, 128, 64, 8, 1, 4)]
    cluster = tma_config(64, 64, 64, 4, 1, 5, 2)
    others = [
        GemmConfig(64, 64, 64, 2, 2, 4),
        GemmConfig(16, 64, 64, 1, 4, 6),
        GemmConfig(128, 128, 32, 2, 2, 4),
        GemmConfig(64, 64, 64, 2, 2, 4, 2),
        warpgroup_config(64, 128, 64, 4, 1, 4),
    ]
    cases = [(problem(259, 1023, 328, steps=(BIAS, GELU)), config) for config in [*tma, *others]]
    cases += [(problem(100, 3054, 520, "bfloat16"), config) for config in [*tma, *others]]
    narrow = [tma_config(128, 112, 64, 4, 1, 6, sets=2), tma_config(64, 160, 64, 4, 1, 7, sets=2)]
    cases += [(problem(259, 1023, 328, steps=steps), c) for steps in ((), (GELU,)) for c in [*tma, *narrow]]
    cases += [(problem(259, columns, 328, steps=(BIAS,)), c) for columns in (1028, 1026) for c in [*tma, *narrow]]
    # More than the L2 cache holds, in less time than it takes to store.
    many = [tma_config(128, 256, 64, 8, 1, 4), tma_config(128, 128, 64, 4, 1, 6, sets=2)]
    cases += [(problem(4160, n, 136, "bfloat16", steps), c) for n, steps in ((8000, (BIAS,)), (7999, ())) for c in many]
    return cases + [(problem(128, 505, 1416, steps=(BIAS,)), config) for config in [cluster, others[3]]]


def tma_config(*sizes, **rest) -> GemmConfig:
    return warpgroup_config(*sizes, tma=True, **rest)


def _products_of_norms():
    """Deferred norms of a: means taken away and not, each kernel, whole tiles and ragged ones."""
    layer_norm, rms_norm = (Norm(kind, 1e-5, False, False) for kind in ("layer_norm", "rms_norm"))

    def product(m, n, k, norm=layer_norm, dtype="float16", **rest):
        return problem(m, n, k, dtype, (BIAS, GELU), a_norm=norm, **rest)

    ragged = {"dtype": "bfloat16", "w_layout": "kn"}
    return [
        (product(512, 768, 256), GemmConfig(64, 64, 64, 2, 2, 3)),
        (product(259, 520, 320, **ragged), GemmConfig(128, 128, 32, 2, 2, 4)),
        (product(33, 520, 832, rms_norm), GemmConfig(16, 64, 64, 1, 4, 6)),
        (product(128, 768, 3072), GemmConfig(64, 64, 64, 2, 2, 4, 4)),
        (product(128, 3072, 768), warpgroup_config(64, 64, 64, 4, 1, 12)),
        (product(259, 520, 320, **ragged), warpgroup_config(128, 256, 64, 8, 1, 3)),
        (product(4096, 3072, 768), tma_config(128, 128, 64, 4, 1, 6, sets=2)),
        (product(2050, 4104, 576, dtype="bfloat16"), tma_config(128, 112, 64, 4, 1, 4, sets=2)),
        (product(2050, 4104, 576, rms_norm, **ragged), tma_config(128, 256, 64, 8, 1, 3)),
        (product(2048, 2304, 768), tma_config(64, 192, 64, 4, 2, 6)),
        (product(2048, 2304, 768, rms_norm), tma_config(128, 96, 64, 8, 1, 6)),
        (product(128, 768, 3072), tma_config(64, 64, 64, 4, 1, 5, 4)),
        (product(259, 520, 1408, **ragged), tma_config(64, 64, 64, 4, 1, 5, 2)),
    ]


def _products_with_normed():
    """A norm's result is added, and statistics are written: as after a transformer's attention, on to its own norm."""
    layer_norm, rms_norm = (Norm(kind, 1e-5, False, False) for kind in ("layer_norm", "rms_norm"))

    def product(m, n, k, norm=layer_norm, dtype="float16", **rest):
        return problem(m, n, k, dtype, (BIAS, Step("add", "normed", norm=norm)), statistics=True, **rest)

    ragged = {"dtype": "bfloat16", "w_layout": "kn"}
    return [
        (product(512, 768, 256), GemmConfig(64, 128, 64, 2, 2, 3)),
        (product(259, 576, 328, rms_norm, **ragged), GemmConfig(128, 128, 32, 2, 2, 4)),
        (product(128, 768, 3072), GemmConfig(64, 128, 64, 2, 2, 3, 2)),
        (product(128, 768, 3072), warpgroup_config(64, 64, 64, 4, 1, 6, 4)),
        (product(259, 576, 328, **ragged), warpgroup_config(128, 128, 64, 8, 1, 3)),
        (product(2050, 768, 520, **ragged), tma_config(64, 256, 64, 4, 1, 4, sets=2)),
        (product(2050, 4160, 520), tma_config(128, 128, 64, 4, 1, 6, sets=2)),
        (product(2050, 4160, 520, rms_norm, "bfloat16"), tma_config(128, 256, 64, 8, 1, 3)),
        (product(2048, 768, 3072), tma_config(64, 256, 64, 4, 2, 5)),
        (product(8192, 768, 3072), tma_config(128, 192, 64, 8, 1, 5)),
        (product(128, 768, 3072), tma_config(64, 64, 64, 4, 1, 5, 4)),
        (product(259, 576, 1416, rms_norm, **ragged), tma_config(64, 64, 64, 4, 1, 5, 2)),
        (product(512, 768, 3072), tma_config(64, 128, 64, 4, 1, 6, 2)),
        (problem(1000, 768, 768, steps=(BIAS, RESIDUAL), statistics=True), tma_config(128, 64, 64, 8, 1, 8)),
        (problem(1000, 768, 768, steps=(RESIDUAL, CLIP), statistics=True), tma_config(128, 64, 64, 8, 1, 8)),
        (problem(128, 768, 3072, steps=(RESIDUAL, CLIP), statistics=True), tma_config(64, 64, 64, 4, 1, 5, 4)),
    ]


def _warpgroup_norms():
    layer_norm = Norm("layer_norm", 1e-5)
    configs = ((64, 64, 64, 4, 1, 6), (64, 128, 64, 4, 1, 4, 2), (128, 128, 64, 8, 1, 3), (128, 256, 64, 8, 1, 4))
    return [
        (problem(m, n, k, steps=(BIAS, RESIDUAL), norm=layer_norm, keeps_sum=m == 259), warpgroup_config(*sizes))
        for sizes in configs
        for m, n, k in ((128, 768, 512), (259, 520, 328), (2048, 1024, 1024))
    ]


def _norms():
    layer_norm, rms_norm = Norm("layer_norm", 1e-5), Norm("rms_norm", 1e-6, bias=False)
    configs = ((16, 64, 64, 1, 4, 6), (32, 64, 64, 1, 4, 4, 4), (64, 128, 32, 2, 4, 4), (128, 128, 64, 2, 2, 3))
    cases = []
    for config in (GemmConfig(*sizes) for sizes in configs):
        for n in (768, 1024, 3072):
            cases.append((problem(128, n, 512, steps=(BIAS, RESIDUAL), norm=layer_norm), config))
        ragged = problem(259, 520, 328, "bfloat16", (BIAS, RESIDUAL), norm=rms_norm, keeps_sum=True)
        cases += [(ragged, config), (problem(2050, 1032, 264, norm=Norm("layer_norm", 1e-5, weight=False)), config)]
    return cases


def _few_rows():
    cases = []
    for columns, warps, unroll in ((8, 8, 2), (16, 8, 4), (32, 8, 4), (8, 4, 1), (16, 16, 2)):
        config = GemvConfig(columns, warps, unroll)
        cases += [(problem(m, 4096, 4096, steps=(BIAS, RESIDUAL)), config) for m in (1, 7, 16)]
        cases.append((problem(5, 1000, 1032, "bfloat16", (BIAS, SILU, GATE)), config))
    return cases
