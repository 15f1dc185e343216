"""The cases of the CUDA kernel of two products: every tile, ragged edges, steps on both sides, parts of the columns.

Only problem and configuration decide the generated source.
"""

from dataclasses import dataclass

import gemm_cases
from gemm_cases import BIAS, GATE, GELU, RESIDUAL, SILU, step_label

from tir_kernels.fusion.mlp import mlp as mlp_cuda
from tir_kernels.fusion.mlp.configs import TILES
from tir_kernels.fusion.mlp.geometry import MlpConfig, MlpGeometry, legal
from tir_kernels.fusion.problem import ACTIVATIONS, GemmProblem, MlpProblem, Step
from tir_kernels.target import parse_target


@dataclass(frozen=True)
class MlpCase:
    problem: MlpProblem
    config: MlpConfig
    template = mlp_cuda

    @property
    def label(self) -> str:
        first, second = self.problem.first, self.problem.second
        text = f"mlp {first.m}x{first.k}x{first.n}x{second.n} {first.dtype}"
        steps = " to ".join(" ".join(map(step_label, p.steps)) or "nothing" for p in (first, second))
        return f"{text} {steps} | {self.config.label}"

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return [(self.problem.m, self.problem.n)]

    def make_inputs(self, seed: int) -> list:
        first, second = self.problem.first, self.problem.second
        return gemm_cases.make_inputs(first, seed) + gemm_cases.make_inputs(second, seed + 1)[1:]

    def torch_sequence(self, *inputs) -> tuple:
        count = len(self.problem.first.inputs)
        inner = gemm_cases.torch_sequence(self.problem.first, *inputs[:count])
        return gemm_cases.torch_sequence(self.problem.second, *inner, *inputs[count:])


def mlp(m, k, inner, n, dtype="float16", inner_steps=(BIAS, GELU), steps=(BIAS, RESIDUAL)) -> MlpProblem:
    first = GemmProblem(m, inner, dtype, tuple(inner_steps), k=k)
    return MlpProblem(first, GemmProblem(m, n, dtype, tuple(steps), k=inner))


def mlp_cases() -> list[MlpCase]:
    limit = int(parse_target("cuda -arch=sm_90a").attrs["max_shared_memory_per_block"])
    return [MlpCase(p, c) for p, c in (*_tiles(), *_steps(), *_pipelines()) if legal(MlpGeometry(p, c), limit)]


def _tiles():
    """Each tile with whole blocks of everything, then with part of one at every edge, then with two tiles within."""
    cases = []
    for tile in TILES:
        cases.append((mlp(2048, 768, 64, 768), MlpConfig(*tile, 4)))
        cases.append((mlp(1000, 328, 120, 520, "bfloat16", (BIAS, GATE, SILU)), MlpConfig(*tile, 3, 2)))
        cases.append((mlp(2048, 768, 256, 768), MlpConfig(*tile, 3)))
        cases.append((mlp(515, 256, 400, 264, steps=(BIAS, SILU, GATE, RESIDUAL)), MlpConfig(*tile, 2)))
    return cases


def _steps():
    small = MlpConfig(32, 64, 1, 4, 4)
    scale, gain = Step("scale", value=0.125), Step("multiply", "row")
    cases = [
        (mlp(100, 200, 72, 136, d, (BIAS, Step(kind))), small) for d in ("float16", "bfloat16") for kind in ACTIVATIONS
    ]
    cases.append((mlp(100, 200, 72, 136, inner_steps=(), steps=()), small))
    cases.append((mlp(100, 200, 72, 136, inner_steps=(scale, gain), steps=(gain, RESIDUAL, scale)), small))
    clip = Step("clip", value=0.5)
    cases.append((mlp(100, 200, 72, 136, inner_steps=(Step("relu"),), steps=(RESIDUAL, clip)), small))
    return cases


def _pipelines():
    """Short of the stages, and one row; the columns in as many parts as there are tiles."""
    cases = [(mlp(m, 8, 8, 64), MlpConfig(16, 64, 1, 4, s)) for m in (1, 96) for s in (2, 6)]
    cases += [(mlp(128, 768, 64, 768), MlpConfig(16, 64, 1, 4, 6, parts)) for parts in (1, 3, 12)]
    cases += [(mlp(512, 1024, 128, 1024), MlpConfig(16, 128, 1, 4, 6, parts)) for parts in (2, 8)]
    cases += [(mlp(4096, 256, 512, 256), MlpConfig(*sizes)) for sizes in ((32, 128, 1, 4, 3), (64, 256, 2, 4, 2))]
    return cases
