"""The cases of the CUDA kernels of grouped products: every tile, ragged edges, empty groups, few rows, gates.

Only problem and configuration decide the generated source; offsets are drawn with the other inputs.
"""

from dataclasses import dataclass

import torch

from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.grouped import grouped as grouped_cuda
from tir_kernels.fusion.grouped import simt
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.problem import Step
from tir_kernels.problems import grouped as grouped_kind
from tir_kernels.target import parse_target


@dataclass(frozen=True)
class GroupedCase:
    """`rows` says how rows are divided: "random" with empty groups and rows of no group, "one" with all in one."""

    problem: GroupedProblem
    config: GemmConfig | simt.Config
    rows: str = "random"

    @property
    def template(self):
        return simt if isinstance(self.config, simt.Config) else grouped_cuda

    @property
    def arch(self) -> str | None:
        return "sm_90a" if getattr(self.config, "warpgroup", False) else None

    @property
    def label(self) -> str:
        p = self.problem
        kinds = [f"{p.gate}-gate"] * (p.gate is not None) + [step.kind for step in p.steps]
        kinds += [f"of-{p.a_rows}-{p.rows_dtype}"] * (p.gathered_from is not None)
        after = "".join(f" {kind}" for kind in kinds)
        sizes = f"{p.groups}x{p.m}x{p.n}x{p.k} {p.dtype} {p.w_layout} {p.offsets_dtype}{after} {self.rows}"
        return f"{self.template.NAME} {sizes} | {self.config.label}"

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return [(self.problem.m, self.problem.n)]

    def make_inputs(self, seed: int, device: str = "cuda") -> list[torch.Tensor]:
        p, dtype = self.problem, getattr(torch, self.problem.dtype)
        generator = torch.Generator(device=device).manual_seed(seed)
        a = torch.randn((p.a_rows, p.k), generator=generator, device=device)
        w = torch.randn(p.w_shape, generator=generator, device=device) * p.k**-0.5
        given = [a.to(dtype), w.to(dtype), offsets(p, self.rows, seed).to(device)]
        if p.gathered_from is None:
            return given
        rows = torch.randint(p.a_rows, (p.m,), generator=generator, device=device)
        return [*given, rows.to(getattr(torch, p.rows_dtype))]

    def torch_sequence(self, *inputs) -> tuple[torch.Tensor, ...]:
        return tuple(grouped_kind.reference(self.problem, list(inputs), torch))


def offsets(problem: GroupedProblem, rows: str, seed: int = 0) -> torch.Tensor:
    """Cumulative ends of the groups' rows."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.offsets_dtype)
    if rows == "one":
        owner = int(torch.randint(problem.groups, (1,), generator=generator))
        return torch.where(torch.arange(problem.groups) < owner, 0, problem.m).to(dtype)
    weights = torch.rand(problem.groups + 1, generator=generator) ** 3 + 1e-6
    weights[torch.rand(problem.groups + 1, generator=generator) < 0.3] = 1e-9
    drawn = torch.multinomial(weights, problem.m, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=problem.groups + 1)[:-1].cumsum(0).to(dtype)


def grouped_cases() -> list[GroupedCase]:
    cases = []
    for arch in ("sm_80", "sm_90a"):
        target = parse_target(f"cuda -arch={arch}")
        for problem in (
            GroupedProblem(1000, 1024, 768, 8, "float16"),
            GroupedProblem(1003, 520, 328, 11, "bfloat16", "kn"),
            GroupedProblem(517, 200, 136, 40, "bfloat16", offsets_dtype="int64"),
        ):
            configs = grouped_cuda.configs(problem, target)
            cases += [GroupedCase(problem, c) for c in configs if c.warpgroup == (arch == "sm_90a")]
        for problem, rows in (
            (GroupedProblem(4096, 2048, 2048, 64, "bfloat16"), "random"),
            (GroupedProblem(4096, 2048, 1024, 64, "float16"), "one"),
            (GroupedProblem(64, 2048, 2048, 64, "bfloat16"), "random"),
            (GroupedProblem(8, 1024, 2048, 128, "float16"), "random"),
            (GroupedProblem(1, 512, 256, 33, "float16"), "one"),
            (GroupedProblem(300, 256, 512, 1, "bfloat16", "kn"), "one"),
            (GroupedProblem(16384, 768, 512, 256, "bfloat16"), "random"),
        ):
            cases.append(GroupedCase(problem, grouped_cuda.configs(problem, target)[0], rows))
        for problem in (
            GroupedProblem(1000, 520, 768, 8, "bfloat16", gate="silu"),
            GroupedProblem(777, 256, 328, 33, "float16", "kn", gate="gelu_tanh", steps=(Step("scale", value=0.5),)),
            GroupedProblem(517, 200, 136, 40, "bfloat16", steps=(Step("relu"), Step("clip", value=1.5))),
        ):
            by_kind = {(c.warpgroup, c.tma, c.sets): c for c in reversed(grouped_cuda.configs(problem, target))}
            cases += [GroupedCase(problem, c) for c in by_kind.values() if c.warpgroup == (arch == "sm_90a")]
        for problem in (
            GroupedProblem(32768, 1024, 2048, 64, "bfloat16", gate="silu"),
            GroupedProblem(8192, 4096, 1024, 8, "bfloat16", "kn"),
        ):
            cases.append(GroupedCase(problem, grouped_cuda.configs(problem, target)[0]))
    for problem in (
        GroupedProblem(1000, 520, 328, 8, "bfloat16", gate="silu", gathered_from=300, rows_dtype="int64"),
        GroupedProblem(777, 256, 328, 33, "float16", "kn", gathered_from=1000),
        GroupedProblem(32768, 1024, 2048, 64, "bfloat16", gate="silu", gathered_from=4096, rows_dtype="int64"),
    ):
        found = grouped_cuda.configs(problem, parse_target("cuda -arch=sm_90a"))
        cases += [GroupedCase(problem, c) for c in (found if problem.m < 32768 else found[:1])]
    for config in (simt.Config(64), simt.Config(16)):
        for problem, rows in (
            (GroupedProblem(1000, 512, 384, 8, "float32"), "random"),
            (GroupedProblem(517, 203, 131, 40, "float32", "kn", "int64"), "random"),
            (GroupedProblem(300, 61, 97, 3, "float16"), "one"),
            (GroupedProblem(9, 130, 50, 70, "bfloat16", "kn"), "random"),
        ):
            cases.append(GroupedCase(problem, config, rows))
    return list(dict.fromkeys(cases))
