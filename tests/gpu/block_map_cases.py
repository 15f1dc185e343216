"""Kernels that write lists at run time, and kernels that read them; here they are compiled.

test_runtime_masks_on_gpu.py and test_packed_on_gpu.py run them.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
from attention_cases import Case

from relax_passes.attention.replaceable_masks import EVERY_BLOCK
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.documents.plan import document_plan
from tir_kernels.attention.documents.tokens import tokens
from tir_kernels.attention.mask_forms import MaskForms
from tir_kernels.attention.problem import AttentionProblem, BlockMap
from tir_kernels.attention.warp_specialized import kernel as specialized
from tir_kernels.cuda.device import gpu_of
from tir_kernels.selection.largest import largest
from tir_kernels.selection.last_weights import normalizers, sums
from tir_kernels.selection.vertical_slash_map import vertical_slash_map
from tir_kernels.target import parse_target

HOPPER = parse_target("cuda -arch=sm_90a")


@dataclass(frozen=True)
class StepCase:
    """A step of a plan; the problem and the configuration are those of the attention that it is for."""

    template: SimpleNamespace
    problem: AttentionProblem
    config: object
    arch: str | None

    @property
    def label(self) -> str:
        return f"{self.template.NAME} {self.problem.q_len}"


def problem(side=128, length=8192, dim=128, dtype="bfloat16", width=None, **rest) -> AttentionProblem:
    block_map = BlockMap(1, 32, side, width or side)
    return AttentionProblem(1, 32, 8, length, length, dim, dim, dtype, dim**-0.5, block_map=block_map, **rest)


def block_map_cases() -> list[Case | StepCase]:
    cases = [Case(problem(dim=dim), c, "full") for dim in (64, 128) for c in specialized.configs(problem(), HOPPER)]
    for given in (problem(64), problem(64, dtype="float32"), problem(64, gives_lse=True, sink_dtype="float32")):
        configs = block_wise_cuda.worth_measuring(block_wise_cuda.configs(given, HOPPER))
        cases += [Case(given, config, "full") for config in configs if config.stages == 2]
    # A thread of the kernel that orders rows holds 1, 12 and more than it can hold.
    for template, side, length in ((specialized, 128, 2048), (block_wise_cuda, 64, 24576), (specialized, 64, 65536)):
        cases += _steps(template, problem(side, length))
    cases += _steps(specialized, problem(128, 2048, width=32))
    cases += _positions(problem())
    given = replace(problem(length=4096), block_map=EVERY_BLOCK)
    cases.append(StepCase(Step("documents' tokens", tokens()), given, block_wise_cuda.configs(given, HOPPER)[0], None))
    for template in (specialized, block_wise_cuda):
        cases += _document_steps(template, given)
    return cases


def _steps(template, given: AttentionProblem) -> list[StepCase]:
    config = template.configs(given, HOPPER)[0]
    stored = MaskForms(given).stored((config.block_m, config.block_n))
    plan = template.plan(given, config, HOPPER, stored)
    functions = {name: step.function for name, step in plan.steps.items()} | {"largest": largest()}
    arch = Case(given, config, "full").arch
    return [StepCase(Step(f"block map {name}", function), given, config, arch) for name, function in functions.items()]


def _positions(given: AttentionProblem) -> list[StepCase]:
    """What finds vertical and slash positions and makes a map of them, for blocks of several shapes."""
    functions = {"normalizers of last": normalizers(), "sums of last": sums()}
    for block in ((128, 128), (128, 32), (64, 128), (16, 32), (48, 32)):
        functions[f"vertical and slash {block}"] = vertical_slash_map(block)
    config = specialized.configs(given, HOPPER)[0]
    return [StepCase(Step(name, function), given, config, None) for name, function in functions.items()]


def _document_steps(template, given: AttentionProblem) -> list[StepCase]:
    """With a mask inside of documents and without."""
    config = template.configs(given, HOPPER)[0]
    arch, found = Case(given, config, "full").arch, {}
    for longest, keeps in ((512, None), (512, np.arange(1023) < 512)):
        reader = template.reader(given, config, HOPPER)
        plan = document_plan(given, (config.block_m, config.block_n), longest, keeps, gpu_of(HOPPER), reader)
        kind = "" if keeps is None else " inside"
        found |= {f"{name}{kind}": step.function for name, step in plan.steps.items() if not kind or "words" in name}
    return [StepCase(Step(f"documents' {name}", function), given, config, arch) for name, function in found.items()]


class Step(SimpleNamespace):
    """What a case needs of a template: a name, and a function for any problem."""

    def __init__(self, name: str, function):
        super().__init__(NAME=name, function=function)

    def __hash__(self):
        return id(self)

    def instantiate(self, problem, config, target):
        return self.function
