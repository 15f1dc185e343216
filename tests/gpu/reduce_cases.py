"""The cases of the CUDA kernel of reductions: every kind, last, first, middle and all axes, split or not, all dtypes.

Only problem and configuration decide the generated source.
"""

from group_cases import Builder, GroupCase

from tir_kernels.fusion.group.problem import REDUCTIONS, GroupProblem
from tir_kernels.fusion.reduce import reduce as reduce_cuda
from tir_kernels.fusion.reduce.geometry import ReduceConfig
from tir_kernels.target import parse_target


def reduced(b: Builder, kind: str, x: int, axes: tuple[int, ...], keepdims: bool = False) -> int:
    """A reduction of a value along some axes."""
    shape = b.of(x).shape
    left = [1 if axis in axes else n for axis, n in enumerate(shape) if keepdims or axis not in axes]
    return b.add(kind, x, shape=left, dtype=b.of(x).dtype, numbers=axes)


def plain(kind, shape, axes, dtype="float16", keepdims=False, out=None) -> GroupProblem:
    """A reduction in float32, or of integers as they are; the result in `out`."""
    b = Builder((shape, dtype))
    x = b.cast(0, "float32") if "float" in dtype else 0
    found = reduced(b, kind, x, axes, keepdims)
    return b.problem(found if out is None else b.cast(found, out))


def variance(shape=(3, 500, 24), axes=(1,), dtype="float16") -> GroupProblem:
    """The scale of a norm: the mean of squared differences from a given center, an epsilon and a root."""
    center = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    b = Builder((shape, dtype), (center, "float32"))
    away = b.add("subtract", 1, b.cast(0, "float32"))
    mean = reduced(b, "mean", b.add("square", away), axes, keepdims=True)
    return b.problem(b.add("rsqrt", b.add("add", mean, b.number(1e-5, "float32"))))


def masked_mean(batch=3, length=70, n=40, dtype="float16") -> GroupProblem:
    """The mean of the tokens that a mask of integers keeps, whose number is given; a row is added to it."""
    b = Builder(((batch, length, n), dtype), ((batch, length), "int64"), ((batch, 1), "float32"), ((n,), dtype))
    keep = b.cast(b.reshape(1, batch, length, 1), "float32")
    total = reduced(b, "sum", b.add("multiply", b.cast(0, "float32"), keep), (1,))
    mean = b.add("divide", total, 2)
    return b.problem(b.cast(b.add("add", mean, b.cast(3, "float32")), dtype), mean)


def counted(shape=(5, 1000), axes=(1,)) -> GroupProblem:
    """How many elements are positive, counted as int64."""
    b = Builder((shape, "float16"))
    positive = b.cast(b.add("greater", 0, b.number(0.0)), "int64")
    return b.problem(b.cast(reduced(b, "sum", positive, axes), "float32"))


def transposed(shape=(2, 24, 300), kind="max", dtype="bfloat16") -> GroupProblem:
    """Along the last axis of a transposition, which is the middle one in memory; the result in another shape."""
    b = Builder((shape, dtype))
    found = reduced(b, kind, b.permute(0, 0, 2, 1), (2,))
    return b.problem(b.reshape(found, shape[0] * shape[2]))


PROBLEMS = {
    "rows": plain("sum", (37, 512), (1,)),
    "short rows": plain("sum", (1000, 8), (1,), "bfloat16"),
    "odd rows": plain("mean", (6, 5, 77), (2,), keepdims=True, out="float16"),
    "one row": plain("sum", (70000,), (0,)),
    "all": plain("max", (5, 40, 333), (0, 1, 2), "bfloat16"),
    "columns": plain("sum", (2000, 96), (0,)),
    "odd columns": plain("mean", (3, 301, 13), (1,), out="float16"),
    "few columns": plain("sum", (5000, 4), (0,), "float32"),
    "middle": plain("max", (3, 50, 7, 16), (1, 2)),
    "first and last": plain("sum", (40, 6, 64), (0, 2), "float32"),
    "first and last but one": plain("sum", (4, 125, 1, 64, 1), (1, 4), "float32", keepdims=True),
    "variance": variance(),
    "variance of many": variance((2, 4000, 64)),
    "masked mean": masked_mean(),
    "masked mean, odd": masked_mean(2, 33, 13, "bfloat16"),
    "counted": counted(),
    "counted all": counted((300, 200), (0, 1)),
    "transposed": transposed(),
    "int32": plain("sum", (64, 3, 40), (0,), "int32", out="float32"),
    "int64": plain("max", (9, 100), (1,), "int64", out="float32"),
    # Few enough that their product is no zero.
    **{f"{kind} of rows": plain(kind, (30, 3, 40), (2,)) for kind in REDUCTIONS},
    **{f"{kind} of columns": plain(kind, (3, 41, 24), (1,), "bfloat16") for kind in REDUCTIONS},
}
# Of 131 or 268 MB, whose times say how much of the memory's bandwidth is reached.
LARGE = {
    "large variance": variance((4, 32000, 512)),
    "large rows": plain("sum", (8192, 16384), (1,)),
    "large columns": plain("sum", (32768, 4096), (0,)),
    "large, all": plain("max", (128, 1024, 1024), (0, 1, 2)),
    "large, short rows": plain("sum", (1 << 24, 8), (1,)),
    "large middle": plain("mean", (64, 2048, 1024), (1,), out="float16"),
}
# Configurations besides the default, that make each way of joining run.
OTHERS = {
    "rows": (ReduceConfig(8, 32), ReduceConfig(1, 64), ReduceConfig(4, 16, 4), ReduceConfig(256, 1)),
    "columns": (ReduceConfig(16, 16, 7), ReduceConfig(4, 64), ReduceConfig(32, 8, 40)),
    "counted all": (ReduceConfig(1, 256, 5),),
    "odd columns": (ReduceConfig(2, 128, 2), ReduceConfig(128, 2)),
    "one row": (ReduceConfig(1, 256, 300), ReduceConfig(1, 512)),
}


def reduce_cases() -> list[GroupCase]:
    target = parse_target("cuda -arch=sm_90a")
    cases = []
    for name, problem in (PROBLEMS | LARGE).items():
        configs = dict.fromkeys((reduce_cuda.configs(problem, target)[0], *OTHERS.get(name, ())))
        cases += [GroupCase(name, problem, config) for config in configs]
    return cases
