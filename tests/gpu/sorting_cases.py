"""The cases of the CUDA kernels that sort: every dtype, short rows and long ones, few of many, ranks, merges.

Only problem and configuration decide the generated source; many of the elements that are drawn are equal, or NaN.
"""

from dataclasses import dataclass

import torch

from tir_kernels.fusion.sorting import merge as merge_cuda
from tir_kernels.fusion.sorting import sort as sort_cuda
from tir_kernels.fusion.sorting.problem import KEYS, MergeProblem, SortProblem
from tir_kernels.problems.registry import kind_of
from tir_kernels.target import parse_target

UNKNOWN = ("uint16", "uint32")  # dtypes that PyTorch does not sort


@dataclass(frozen=True)
class SortingCase:
    """`make_inputs` and `torch_sequence` are in the order of the kernel's arguments; outputs follow the inputs."""

    problem: SortProblem | MergeProblem
    config: sort_cuda.Config | merge_cuda.Config

    @property
    def template(self):
        return sort_cuda if isinstance(self.problem, SortProblem) else merge_cuda

    @property
    def label(self) -> str:
        p = self.problem
        what = [p.dtype, p.order_dtype, *["descending"] * p.descending, *["ranks"] * p.ranks]
        sizes = f"{p.rows}x{p.n} runs of {p.run} keep {p.keep}"
        return f"{self.template.NAME} {sizes} {' '.join(what)} | {self.config.label}"

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return [shape for shape, _ in self.problem.outputs]

    @property
    def out_dtypes(self) -> list[str]:
        return [dtype for _, dtype in self.problem.outputs]

    def make_inputs(self, seed: int, device: str = "cuda") -> list[torch.Tensor]:
        """Elements in runs, and where they came from; half of the integers are small, some of the floats NaN."""
        p = self.problem
        x = elements((p.rows, p.n), p.dtype, torch.Generator(device=device).manual_seed(seed), device)
        order = torch.arange(p.n, device=device).expand(x.shape)
        if isinstance(p, SortProblem):
            return [x]
        found = [part.sort(dim=1, descending=p.descending, stable=True) for part in x.split(p.run, 1)]
        order = torch.cat([o.gather(1, f.indices) for o, f in zip(order.split(p.run, 1), found)], 1)
        return [torch.cat([f.values for f in found], 1), order.to(torch.int32)]

    def torch_sequence(self, *inputs) -> tuple[torch.Tensor, ...]:
        return tuple(kind_of(self.problem).reference(self.problem, list(inputs), torch))


def elements(shape, dtype: str, generator, device) -> torch.Tensor:
    """Random elements of any dtype, in a wide range and in a narrow one."""
    kind, narrow = getattr(torch, dtype), torch.rand(shape, generator=generator, device=device) < 0.5
    if kind == torch.bool:
        return narrow
    if kind.is_floating_point:
        x = torch.randn(shape, generator=generator, device=device)
        x = torch.where(narrow, (x * 4).round() / 4 + 0.0, x * 1e3)
        x = torch.where(torch.rand(shape, generator=generator, device=device) < 0.02, torch.nan, x)
        return torch.where(x == 0, torch.rand(shape, generator=generator, device=device), x).to(kind)
    limits = torch.iinfo(kind)
    wide = torch.randint(limits.min, limits.max, shape, generator=generator, device=device)
    few = torch.randint(0, 9, shape, generator=generator, device=device)
    return torch.where(narrow, few, wide).to(kind)


def sort_of(rows, n, dtype, keep=None, run=None, **more) -> SortProblem:
    run = min(n, 1024) if run is None else run
    return SortProblem(rows, n, run, min(keep or run, run), dtype, **more)


def merge_of(rows, n, run, dtype, keep=None, **more) -> MergeProblem:
    whole = min(run * 32, n)
    return MergeProblem(rows, n, run, min(keep or whole, whole), dtype, **more)


def sorting_cases() -> list[SortingCase]:
    target = parse_target("cuda -arch=sm_80")
    every = [
        sort_of(4096, 64, "float32", 8, descending=True),
        sort_of(3, 32768, "int64", order_dtype="int32"),
        merge_of(1, 32768, 1024, "int64", ranks=True),
        merge_of(2, 5000, 1024, "float16", 50, descending=True),
    ]
    one = [
        *(sort_of(7, 77, dtype, descending=i % 2 == 1) for i, dtype in enumerate(KEYS) if dtype not in UNKNOWN),
        *(merge_of(3, 700, 100, dtype, descending=i % 2 == 0) for i, dtype in enumerate(KEYS) if dtype not in UNKNOWN),
        sort_of(1, 1, "float32"),
        sort_of(5, 2, "int64", ranks=True),
        sort_of(1000, 8, "bfloat16", 2, descending=True),
        sort_of(3, 13, "int32", 5, order_dtype="int32"),
        sort_of(129, 33, "float16", ranks=True),
        sort_of(300, 128, "float32", 6, descending=True),
        sort_of(20, 257, "bfloat16"),
        sort_of(2, 1023, "float32", ranks=True),
        sort_of(9, 1024, "int64"),
        sort_of(4, 50257, "float16", 50, descending=True, order_dtype="int32"),
        sort_of(2, 2500, "float64", order_dtype="int32"),
        merge_of(4, 2455, 50, "float16", 50, descending=True, order_dtype="int32"),
        merge_of(1, 100000, 1024, "float32", order_dtype="int32"),
        merge_of(1, 100000, 32768, "float32"),
        merge_of(70, 33, 16, "bfloat16"),
        merge_of(5, 9, 1, "bool", ranks=True),
    ]
    cases = []
    for problems, all_configs in ((every, True), (one, False)):
        for problem in problems:
            template = sort_cuda if isinstance(problem, SortProblem) else merge_cuda
            configs = template.configs(problem, target)
            cases += [SortingCase(problem, config) for config in (configs if all_configs else configs[:1])]
    return list(dict.fromkeys(cases))
