"""This project's fused kernels: the one that is predicted to be the fastest, and the first of the others."""

import itertools
import math
from dataclasses import dataclass
from types import ModuleType

import tvm

from benchmarks.fusion.cases import BERT, SHORT, FusionCase
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.compile import tir_pipeline_name
from tir_kernels.errors import UnsupportedError
from tir_kernels.fusion.problem import MlpProblem, RowProblem
from tir_kernels.fusion.registry import TEMPLATES, templates_for
from tir_kernels.target import parse_target

ENTRY = "main"
MMA = "stof-mma"  # without the instructions of one architecture
MMA_TRIED = 8  # configurations


@dataclass(frozen=True)
class Kernel:
    """A configuration of the template called `name` for a problem, `predicted_us` long."""

    name: str
    problem: RowProblem | MlpProblem
    config: object
    predicted_us: float

    @property
    def template(self) -> ModuleType:
        return next(t for t in TEMPLATES if t.NAME == self.name)

    @property
    def label(self) -> str:
        return f"{self.name} {self.config.label}"


def candidates(problem: RowProblem | MlpProblem, target, count: int, is_wanted=lambda config: True) -> list[Kernel]:
    """The `count` wanted configurations of all templates that are predicted to be the fastest.

    UnsupportedError if there is none.
    """
    found, reasons = [], []
    for template in templates_for(target):
        if why := template.unsupported(problem, target):
            reasons.append(f"{template.NAME}: {why}")
            continue
        # In the template's own order.
        some = list(itertools.islice(filter(is_wanted, template.configs(problem, target)), count))
        found += [Kernel(template.NAME, problem, c, template.predict_us(problem, c, target)) for c in some]
    if not found:
        raise UnsupportedError(f"no template computes it: {'; '.join(reasons)}")
    return sorted(found, key=lambda kernel: kernel.predicted_us)[:count]


def variants(system: str, case: FusionCase, target, count: int) -> list[tuple[Kernel, ...]]:
    """What a system may run, the default first: one kernel each, or two for "stof-unfused".

    "stof-mma" runs on every GPU since sm_80: no wgmma, and no copies by the tensor memory accelerator.
    """
    if system == MMA:
        some = candidates(case.problem, target, MMA_TRIED, lambda config: not getattr(config, "warpgroup", False))
        return [(kernel,) for kernel in some]
    if system == "stof-unfused":
        return [tuple(candidates(problem, target, 1)[0] for problem in case.unfused)]
    return [(kernel,) for kernel in candidates(case.problem, target, count)]


def systems_for(case: FusionCase, tuned: int) -> tuple[str, ...]:
    unfused = ("stof-unfused",) if case.template in ("gemm-norm", "mlp") else ()
    mma = (MMA,) if case.template == "gemm-gelu" and (case.n, case.k) in BERT and case.m in SHORT else ()
    return ("stof", *(["stof-tuned"] if tuned > 1 else []), *unfused, *mma)


def build(kernel: Kernel, arch: str, path: str) -> str:
    """Compile a kernel to a library; gives its path."""
    target = parse_target(f"cuda -arch={arch}")
    with quick_script():
        function = kernel.template.instantiate(kernel.problem, kernel.config, target)
    with target:
        module = tvm.IRModule({ENTRY: function.with_attr("global_symbol", ENTRY)})
        tvm.compile(module, target=target, tir_pipeline=tir_pipeline_name).export_library(path)
    return path


def load(kernels: tuple[Kernel, ...], paths: list[str]):
    """A function of a case's arguments that runs the kernels one after the other."""
    import torch

    loaded = []
    for kernel, path in zip(kernels, paths, strict=True):
        workspace = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
            for shape, dtype in kernel.template.operands(kernel.problem, kernel.config, parse_target()).workspace
        ]
        loaded.append((kernel.problem, tvm.runtime.load_module(path)[ENTRY], workspace))

    def call(*inputs):
        at = 0
        sources = ()
        for problem, function, workspace in loaded:
            # A kernel after another takes that one's output as its source, and goes on with the inputs that are left.
            count = len(problem.inputs) - len(sources)
            out = torch.empty((problem.m, problem.n), dtype=inputs[0].dtype, device="cuda")
            function(*sources, *inputs[at : at + count], *workspace, out)
            at, sources = at + count, (out,)
        return out

    return call


def predicted_us(kernels: tuple[Kernel, ...]) -> float:
    return math.fsum(kernel.predicted_us for kernel in kernels)
