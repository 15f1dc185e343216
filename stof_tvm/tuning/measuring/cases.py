"""Test data for the kernels of one problem: random inputs and the outputs that they must give.

A result may be off by twice PyTorch's own error in the kernel's dtype, or by roundings.
"""

import functools
import math
from pathlib import Path

import torch
import tvm

from stof_tvm.tuning.measuring.job import LIBRARY, KernelJob, ScheduleJob, load_mask
from stof_tvm.tuning.measuring.references import attention_reference, fusion_reference
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.select import compile_mask
from tir_kernels.fusion.problem import GemmProblem, MlpProblem
from tir_kernels.fusion.rows.embedding import EmbeddingProblem
from tir_kernels.fusion.rows.rotary import RotaryProblem
from tir_kernels.tuning.template_space import TEMPLATES

ERROR_FACTOR = 2  # of PyTorch's error in the kernel's own dtype
L2_ROUNDS = 3  # sets of inputs take turns; together they are this many times the L2 cache
# Units in the last place of the largest element that are no error: float32 sums in another order than PyTorch's.
ROUNDINGS = {torch.float32: 32}
MAX_SETS = 64
MAX_BYTES = 2 << 30
# Of two schedules of one PrimFunc, which add in different orders, relative to the largest element.
SCHEDULE_TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "float16": 1e-2, "bfloat16": 5e-2}


class Case:
    """Inputs, expected outputs and their tolerances.

    Attributes
    ----------
    sets : list of list of Tensor
        Inputs that take turns, so that none is in the L2 cache.
    outputs : list of Tensor
        What kernels write to.
    """

    def __init__(self, draw, device: torch.device):
        """`draw()` gives one set of inputs."""
        self.device = device
        self.sets = _rotating(draw, device)
        self.outputs = []
        self.expected = []
        self.allowed = []

    def expect(self, expected: list, half: list, dtypes: list) -> None:
        """Take the outputs of the first set, computed with more bits, and by PyTorch in the outputs' own dtypes."""
        self.expected = expected
        self.outputs = [torch.empty(x.shape, dtype=dtype, device=self.device) for x, dtype in zip(expected, dtypes)]
        for x, y, dtype in zip(expected, half, dtypes):
            finite = x[x.isfinite()]
            units = ROUNDINGS.get(dtype, 1) * torch.finfo(dtype).eps
            rounding = units * float(finite.abs().max()) if len(finite) else 0.0
            self.allowed.append(max(ERROR_FACTOR * _distance(y, x), rounding))

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
        generator = torch.Generator(device=device).manual_seed(seed)
        super().__init__(lambda: _fusion_inputs(problem, generator, device), device)
        dtype = getattr(torch, problem.dtype)
        first = self.sets[0]
        expected = fusion_reference(problem, _widened(first, dtype))
        self.expect(expected, fusion_reference(problem, first), [dtype] * len(expected))

    def arguments(self, job: KernelJob):
        """A function from a set of inputs to the arguments of a kernel."""
        workspace = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)
            for shape, dtype in TEMPLATES[job.template].workspace(job.problem, job.config)
        ]
        return lambda inputs: [*inputs, *workspace, *self.outputs]


class AttentionCase(Case):
    """The case of an attention and its mask."""

    def __init__(self, problem: AttentionProblem, mask, device: torch.device, seed: int):
        self.problem, self.mask = problem, mask
        generator = torch.Generator(device=device).manual_seed(seed)
        super().__init__(lambda: _attention_inputs(problem, generator, device), device)
        lengths = problem.q_len, problem.kv_len
        keep = torch.ones(lengths, dtype=torch.bool) if mask is None else mask.dense(*lengths)
        keep = keep.reshape((1,) * (4 - keep.dim()) + keep.shape).to(device)
        dtype = getattr(torch, problem.dtype)
        first = self.sets[0]
        expected = attention_reference(problem, _widened(first, dtype), keep)
        dtypes = [dtype, torch.float32][: len(expected)]
        self.expect(expected, attention_reference(problem, first, keep), dtypes)

    def arguments(self, job: KernelJob):
        template, config = TEMPLATES[job.template], job.config
        stride = getattr(config, "token_stride", 1)
        block = config.block_m, config.block_n  # type: ignore[attr-defined]  # every attention template has blocks
        compiled = compile_mask(self.mask, self.problem, block, stride)
        operands = [torch.from_numpy(x).to(self.device) for x in template.mask_operands(compiled, self.problem)]
        return lambda inputs: [*inputs, *operands, *self.outputs]


class ScheduleCase(Case):
    """The case of a PrimFunc, whose outputs are to be what the same with the default schedule writes."""

    def __init__(self, job: ScheduleJob, device: torch.device, seed: int):
        generator = torch.Generator(device=device).manual_seed(seed)
        super().__init__(lambda: [_random(*argument, generator, device) for argument in job.arguments], device)
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
    if isinstance(job.problem, AttentionProblem) and job.mask is not None:
        return AttentionCase(job.problem, load_mask(folder, job.mask), device, seed)
    return FusionCase(job.problem, device, seed)


def _rotating(draw, device) -> list[list[torch.Tensor]]:
    """As many sets as the L2 cache and the memory suggest."""
    first = draw()
    if device.type != "cuda":
        return [first]
    size = sum(x.numel() * x.element_size() for x in first)
    wanted = math.ceil(L2_ROUNDS * torch.cuda.get_device_properties(device).L2_cache_size / size)
    count = max(1, min(wanted, MAX_SETS, MAX_BYTES // size))
    return [first, *(draw() for _ in range(count - 1))]


def _fusion_inputs(problem, generator, device) -> list[torch.Tensor]:
    normal = functools.partial(_random, generator=generator, device=device)
    if isinstance(problem, RotaryProblem):
        angles = 6.3 * torch.rand(problem.table_shape, generator=generator, device=device)
        tables = [x.to(getattr(torch, problem.table_dtype)) for x in (angles.cos(), angles.sin())]
        return [*(normal(shape, problem.dtype) for shape in problem.source_shapes), *tables]
    if isinstance(problem, EmbeddingProblem):
        inputs = []
        for i, table in enumerate(problem.tables):
            index = torch.randint(table.rows, problem.index_shape(i), generator=generator, device=device)
            inputs += [index.to(getattr(torch, problem.index_dtype)), normal((table.rows, problem.n), problem.dtype)]
        return [*inputs, *(normal(shape, problem.dtype) for shape in problem.of_sum.operand_shapes)]
    if isinstance(problem, MlpProblem):
        return _fusion_inputs(problem.first, generator, device) + _fusion_inputs(problem.second, generator, device)[1:]
    operands = [normal(shape, problem.dtype) for shape in problem.operand_shapes]
    if isinstance(problem, GemmProblem):
        # Elements of the product are about one.
        return [
            normal((problem.m, problem.k), problem.dtype),
            normal(problem.w_shape, problem.dtype) * problem.k**-0.5,
            *operands,
        ]
    return [normal((problem.m, problem.n), problem.dtype), *operands]


def _attention_inputs(problem: AttentionProblem, generator, device) -> list[torch.Tensor]:
    normal = functools.partial(_random, generator=generator, device=device)
    inputs = [normal(problem.shape(name), problem.dtype) for name in "qkv"]
    if problem.bias_shape is not None:
        inputs.append(normal(problem.bias_shape, problem.bias_dtype))
    if problem.sink_dtype is not None:
        inputs.append(normal((problem.q_heads,), problem.sink_dtype))
    if problem.continues:
        inputs += [normal(problem.shape("out"), problem.dtype), normal(problem.lse_shape, "float32")]
    return inputs


def _random(shape, dtype: str, generator, device) -> torch.Tensor:
    """Normal numbers; zeros for integers, which may be indices into what is not known here."""
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return torch.zeros(shape, dtype=kind, device=device)
    return torch.randn(shape, generator=generator, device=device).to(kind)


def _widened(inputs, dtype) -> list[torch.Tensor]:
    exact = torch.float64 if dtype == torch.float32 else torch.float32
    return [x.to(exact) if x.is_floating_point() else x for x in inputs]


def _distance(x: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; infinities agree with themselves, NaN with nothing."""
    return float(torch.where(x == expected, 0.0, (x.to(expected.dtype) - expected).abs()).max())
