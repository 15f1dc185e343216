"""Test data for the kernels of one problem: random inputs and the outputs that they must give.

A result may be off by twice PyTorch's own error in the kernel's dtype, or by roundings.
"""

import math
from pathlib import Path
from typing import cast

import torch
import tvm

from stof_tvm.tuning.measuring.job import LIBRARY, KernelJob, ScheduleJob, load_mask
from tir_kernels.attention.mask_forms import MaskForms
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.template import AttentionConfig
from tir_kernels.problems.registry import kind_of
from tir_kernels.target import parse_target
from tir_kernels.template import Operands
from tir_kernels.tuning.template_space import TEMPLATES

ERROR_FACTOR = 2  # the allowed error, in multiples of PyTorch's error in the kernel's own dtype
L2_ROUNDS = 3  # sets of inputs take turns; together they are this many times the L2 cache
# Allowed units in the last place of the largest element: kernels sum float32 in another order than PyTorch.
ROUNDINGS = {torch.float32: 32}
MAX_SETS = 64
MAX_BYTES = 2 << 30
# Allowed difference of two schedules of one PrimFunc, which add in different orders, relative to the largest element.
SCHEDULE_TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "float16": 1e-2, "bfloat16": 5e-2}


class Random:
    """Random tensors on a device; see tir_kernels/problems/kind.py."""

    def __init__(self, device: torch.device, seed: int):
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if not kind.is_floating_point:
            return torch.zeros(shape, dtype=kind, device=self.device)
        return torch.randn(shape, generator=self.generator, device=self.device).to(kind)

    def integers(self, end: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return self.cast(torch.randint(end, shape, generator=self.generator, device=self.device), dtype)

    def uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def cast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        return x.to(getattr(torch, dtype))


class Case:
    """Inputs, expected outputs and their tolerances.

    Attributes
    ----------
    sets : list of list of Tensor
        Inputs that take turns, so that none is in the L2 cache.
    outputs : list of Tensor
        The tensors that kernels write.
    """

    def __init__(self, draw, device: torch.device):
        """`draw()` gives one set of inputs."""
        self.device = device
        self.sets = _rotating(draw, device)
        self.outputs = []
        self.expected = []
        self.allowed = []

    def expect(self, expected: list, half: list, dtypes: list) -> None:
        """Set the first set's outputs: `expected` with more bits, `half` by PyTorch in the outputs' own `dtypes`."""
        self.expected = expected
        self.outputs = [torch.empty(x.shape, dtype=dtype, device=self.device) for x, dtype in zip(expected, dtypes)]
        for x, y, dtype in zip(expected, half, dtypes):
            if not dtype.is_floating_point:
                self.allowed.append(0.0)
                continue
            finite = x[x.isfinite()]
            units = ROUNDINGS.get(dtype, 1) * torch.finfo(dtype).eps
            rounding = units * float(finite.abs().max()) if len(finite) else 0.0
            self.allowed.append(max(ERROR_FACTOR * _distance(y, x), rounding))

    def _on_device(self, operands: Operands) -> list[torch.Tensor]:
        constants = [torch.from_numpy(x).to(self.device) for x in operands.constants]
        zeros = [torch.zeros(x[0], dtype=getattr(torch, x[1]), device=self.device) for x in operands.workspace]
        return constants + zeros

    def poison(self) -> None:
        for x in self.outputs:
            x.fill_(float("nan") if x.is_floating_point() else -1)

    def mistake(self) -> str | None:
        """What is wrong with the outputs, or None."""
        for i, (x, expected, allowed) in enumerate(zip(self.outputs, self.expected, self.allowed)):
            error = _distance(x, expected)
            if not error <= allowed:
                return f"wrong numbers: output {i} is off by {error:.2e}, allowed is {allowed:.2e}"
        return None


class FusionCase(Case):
    """The case of a problem of the fusion templates."""

    def __init__(self, problem, device: torch.device, seed: int):
        random = Random(device, seed)
        kind = kind_of(problem)
        super().__init__(lambda: kind.draw(problem, random), device)
        dtype = getattr(torch, problem.dtype)
        first = self.sets[0]
        expected = kind.reference(problem, _widened(first, dtype), torch)
        self.expect(expected, kind.reference(problem, first, torch), [getattr(torch, x) for _, x in problem.outputs])

    def arguments(self, job: KernelJob):
        """A function from a set of inputs to the arguments of a kernel."""
        operands = self._on_device(TEMPLATES[job.template].operands(job.problem, job.config, parse_target(job.target)))
        return lambda inputs: [*inputs, *operands, *self.outputs]


class AttentionCase(Case):
    """The case of an attention and its mask."""

    def __init__(self, problem: AttentionProblem, mask, device: torch.device, seed: int):
        self.problem, self.mask = problem, mask
        random = Random(device, seed)
        kind = kind_of(problem)
        super().__init__(lambda: kind.draw(problem, random), device)
        lengths = problem.q_len, problem.kv_len
        keep = torch.ones(lengths, dtype=torch.bool) if mask is None else mask.dense(*lengths)
        keep = keep.reshape((1,) * (4 - keep.dim()) + keep.shape).to(device)
        dtype = getattr(torch, problem.dtype)
        first = self.sets[0]
        expected = kind.reference(problem, _widened(first, dtype), torch, keep)
        dtypes = [dtype, torch.float32][: len(expected)]
        self.expect(expected, kind.reference(problem, first, torch, keep), dtypes)

    def arguments(self, job: KernelJob):
        config = cast(AttentionConfig, job.config)
        stored = MaskForms(self.problem, self.mask, config.token_stride).stored((config.block_m, config.block_n))
        operands = self._on_device(
            TEMPLATES[job.template].operands(self.problem, config, parse_target(job.target), stored)
        )
        return lambda inputs: [*inputs, *operands, *self.outputs]


class ScheduleCase(Case):
    """The case of a PrimFunc: its outputs must be those that it writes with its default schedule."""

    def __init__(self, job: ScheduleJob, device: torch.device, seed: int):
        random = Random(device, seed)
        super().__init__(lambda: [random.normal(*argument) for argument in job.arguments], device)
        before = [x.clone() for x in self.sets[0]]
        tvm.runtime.load_module(str(Path(job.reference, LIBRARY)))["main"](*self.sets[0])
        self.written = [i for i, (x, y) in enumerate(zip(self.sets[0], before)) if not torch.equal(x, y)]
        self.expected = [self.sets[0][i].clone() for i in self.written]
        self.outputs = [self.sets[0][i] for i in self.written]
        for x in self.expected:
            tolerance = SCHEDULE_TOLERANCE.get(str(x.dtype).removeprefix("torch."), 0.0)
            self.allowed.append(tolerance * float(x.abs().max()))

    def arguments(self, job: ScheduleJob):
        return lambda inputs: inputs


def case_of(job: KernelJob | ScheduleJob, folder: Path, device: torch.device, seed: int) -> Case:
    """The case of a job; `folder` holds the masks."""
    if isinstance(job, ScheduleJob):
        return ScheduleCase(job, device, seed)
    if job.mask is not None:
        return AttentionCase(cast(AttentionProblem, job.problem), load_mask(folder, job.mask), device, seed)
    return FusionCase(job.problem, device, seed)


def _rotating(draw, device) -> list[list[torch.Tensor]]:
    """Enough sets to exceed the L2 cache, within limits of number and memory."""
    first = draw()
    if device.type != "cuda":
        return [first]
    size = sum(x.numel() * x.element_size() for x in first)
    wanted = math.ceil(L2_ROUNDS * torch.cuda.get_device_properties(device).L2_cache_size / size)
    count = max(1, min(wanted, MAX_SETS, MAX_BYTES // size))
    return [first, *(draw() for _ in range(count - 1))]


def _widened(inputs, dtype) -> list[torch.Tensor]:
    exact = torch.float64 if dtype == torch.float32 else torch.float32
    return [x.to(exact) if x.is_floating_point() else x for x in inputs]


def _distance(x: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; infinities agree with themselves, NaN with nothing."""
    kind = expected.dtype if expected.is_floating_point() else torch.float64
    return float(torch.where(x == expected, 0.0, (x.to(kind) - expected.to(kind)).abs()).max())
