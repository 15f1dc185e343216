"""The cases of the CUDA kernel of elementwise groups: views of every kind, norms of rows, several results, all dtypes.

Only problem and configuration decide the generated source.
"""

from dataclasses import dataclass

import torch

from tir_kernels.fusion.group import group as group_cuda
from tir_kernels.fusion.group.group import GroupConfig
from tir_kernels.fusion.group.operators import OF_BOOLEANS
from tir_kernels.fusion.group.problem import GroupProblem, Tensor, Value
from tir_kernels.fusion.reduce import reduce as reduce_cuda
from tir_kernels.fusion.reduce.geometry import ReduceConfig
from tir_kernels.problems import group as group_kind
from tir_kernels.target import parse_target

EVERY_SIZE = ("float16", "float32", "int8", "int64")
CLASSES = ("isnan", "isinf", "isfinite")
BOOLEANS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", *CLASSES, *OF_BOOLEANS)


@dataclass(frozen=True)
class GroupCase:
    """`make_inputs` and `torch_sequence` are in the order of the kernel's arguments; outputs follow the inputs."""

    name: str
    problem: GroupProblem
    config: GroupConfig | ReduceConfig

    @property
    def template(self):
        return reduce_cuda if isinstance(self.config, ReduceConfig) else group_cuda

    @property
    def label(self) -> str:
        shapes = " ".join("x".join(map(str, source.shape)) + f" {source.dtype}" for source in self.problem.sources)
        return f"{self.template.NAME} {self.name} {shapes} | {self.config.label}"

    def make_inputs(self, seed: int, device: str = "cuda") -> list[torch.Tensor]:
        """Fresh and random: normal numbers, integers from -3 to 3, both booleans."""
        generator = torch.Generator(device=device).manual_seed(seed)
        found = []
        for source in self.problem.sources:
            dtype = getattr(torch, source.dtype)
            if dtype.is_floating_point:
                found.append(torch.randn(source.shape, generator=generator, device=device).to(dtype))
            else:
                low, high = (0, 2) if dtype == torch.bool else (-3, 4)
                found.append(torch.randint(low, high, source.shape, generator=generator, device=device).to(dtype))
        return found

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return [shape for shape, _ in self.problem.outputs]

    @property
    def out_dtypes(self) -> list[str]:
        return [dtype for _, dtype in self.problem.outputs]

    def torch_sequence(self, *inputs) -> tuple[torch.Tensor, ...]:
        """PyTorch's unfused operators, in the dtype of the inputs."""
        return tuple(group_kind.reference(self.problem, list(inputs), torch))


class Builder:
    """Writes a problem down: each method adds a value and returns it; sources come first."""

    def __init__(self, *sources: tuple[tuple[int, ...], str]):
        self.sources = tuple(Tensor(*source) for source in sources)
        self.values: list[Value] = []

    def problem(self, *results: int) -> GroupProblem:
        return GroupProblem(self.sources, tuple(self.values), results)

    def of(self, number: int) -> Tensor | Value:
        return (*self.sources, *self.values)[number]

    def add(self, operator: str, *arguments: int, shape=None, dtype=None, numbers=()) -> int:
        given = [self.of(argument) for argument in arguments]
        shape = tuple(torch.broadcast_shapes(*(x.shape for x in given))) if shape is None else tuple(shape)
        dtype = dtype or ("bool" if operator in BOOLEANS else given[-1].dtype)
        self.values.append(Value(operator, arguments, shape, dtype, tuple(numbers)))
        return len(self.sources) + len(self.values) - 1

    def number(self, value, dtype="float16") -> int:
        return self.add("constant", shape=(), dtype=dtype, numbers=(value,))

    def cast(self, x: int, dtype: str) -> int:
        return self.add("cast", x, dtype=dtype)

    def reshape(self, x: int, *shape: int) -> int:
        return self.add("reshape", x, shape=shape)

    def permute(self, x: int, *axes: int) -> int:
        return self.add("permute", x, shape=[self.of(x).shape[axis] for axis in axes], numbers=axes)

    def cut(self, x: int, axis: int, first: int, last: int, step: int = 1) -> int:
        """x[first:last:step] along an axis."""
        shape = list(self.of(x).shape)
        axis %= len(shape)
        shape[axis] = -(-(last - first) // step)
        numbers = [n for a in range(len(shape)) for n in ((first, step) if a == axis else (0, 1))]
        return self.add("slice", x, shape=shape, numbers=numbers)

    def concat(self, axis: int, *parts: int) -> int:
        shape = list(self.of(parts[0]).shape)
        axis %= len(shape)
        shape[axis] = sum(self.of(part).shape[axis] for part in parts)
        return self.add("concat", *parts, shape=shape, numbers=(axis,))

    def pad(self, x: int, value: float, *sides: tuple[int, int]) -> int:
        shape = [n + before + after for n, (before, after) in zip(self.of(x).shape, sides)]
        return self.add("pad", x, shape=shape, numbers=(value, *(before for before, _ in sides)))

    def norm(self, kind: str, x: int, weight: int | None = None, bias: int | None = None, eps: float = 1e-5) -> int:
        vectors = [vector for vector in (weight, bias) if vector is not None]
        numbers = (eps, int(weight is not None), int(bias is not None))
        return self.add(kind, x, *vectors, shape=self.of(x).shape, dtype=self.of(x).dtype, numbers=numbers)

    def halves(self, x: int) -> tuple[int, int]:
        n = self.of(x).shape[-1]
        return self.cut(x, -1, 0, n // 2), self.cut(x, -1, n // 2, n)

    def rotated(self, x: int, cos: int, sin: int) -> int:
        """LLaMA's rotation of the halves, in float32."""
        low, high = self.halves(x)
        turned = self.concat(-1, self.add("negative", high), low)
        wide = [self.cast(value, "float32") for value in (x, turned)]
        return self.cast(
            self.add("add", self.add("multiply", wide[0], cos), self.add("multiply", wide[1], sin)), self.of(x).dtype
        )


def packed_rotation(dtype="float16", heads=4, kv_heads=2, dim=64, batch=2, length=37, norms="", table="float32"):
    """Queries and keys of one projection, turned; `norms` is "", "head" or "row": what is normalised before."""
    total = heads + 2 * kv_heads
    b = Builder(((batch, length, total * dim), dtype), ((length, dim), table), ((length, dim), table), ((dim,), dtype))
    b.sources += (Tensor((heads * dim,), dtype), Tensor((kv_heads * dim,), dtype)) if norms == "row" else ()
    results = []
    for index, (count, first) in enumerate(((heads, 0), (kv_heads, heads))):
        x = b.cut(0, -1, first * dim, (first + count) * dim)
        x = b.norm("rms_norm", x, 4 + index) if norms == "row" else x
        x = b.reshape(x, batch, length, count, dim)
        x = b.norm("rms_norm", x, 3) if norms == "head" else x
        results.append(b.rotated(b.permute(x, 0, 2, 1, 3), 1, 2))
    return b.problem(*results)


def partial_rotation(dtype="float16", dim=64, turned=16):
    b = Builder(((2, 19, 3, dim), dtype), ((19, turned), dtype), ((19, turned), dtype))
    x = b.permute(0, 0, 2, 1, 3)
    return b.problem(b.concat(-1, b.rotated(b.cut(x, -1, 0, turned), 1, 2), b.cut(x, -1, turned, dim)))


def interleaved_rotation(dtype="float16", dim=64, is_normed=False, doubled=False):
    """GPT-J's: even and odd elements are the pairs; with `is_normed`, Wan's, of a normalised row of all heads.

    Tables that are `doubled` hold each number twice, and a pair reads the first cosine and the second sine.
    """
    weight = [((3 * dim,), dtype)] if is_normed else []
    table = (19, 1, dim if doubled else dim // 2), dtype
    b = Builder(((2, 19, 3, dim), dtype), table, table, *weight)
    cos, sin = (b.cut(1 + i, -1, i, dim, 2) for i in (0, 1)) if doubled else (1, 2)
    x = b.reshape(b.norm("rms_norm", b.reshape(0, 2, 19, 3 * dim), 3), 2, 19, 3, dim) if is_normed else 0
    even, odd = b.cut(x, -1, 0, dim, 2), b.cut(x, -1, 1, dim, 2)
    low = b.add("subtract", b.add("multiply", even, cos), b.add("multiply", odd, sin))
    high = b.add("add", b.add("multiply", odd, cos), b.add("multiply", even, sin))
    pairs = b.concat(-1, b.reshape(low, 2, 19, 3, dim // 2, 1), b.reshape(high, 2, 19, 3, dim // 2, 1))
    return b.problem(pairs if is_normed else b.reshape(pairs, 2, 19, 3, dim))


def gated_halves(n=2304, dtype="float16", activation="gelu", interleaved=False, m=77):
    b = Builder(((1, m, 2 * n), dtype))
    gate, value = (b.cut(0, -1, i, 2 * n, 2) for i in (0, 1)) if interleaved else b.halves(0)
    return b.problem(b.add("multiply", b.add(activation, gate), value))


def class_token(n=768, patches=196, dtype="float16"):
    b = Builder(((3, patches, n), dtype), ((1, 1, n), dtype), ((1, patches + 1, n), dtype))
    joined = b.concat(1, b.add("broadcast", 1, shape=(3, 1, n)), 0)
    return b.problem(b.add("add", joined, 2))


def transposed(shape=(2, 40, 24, 64), axes=(0, 3, 1, 2), dtype="float16"):
    b = Builder((shape, dtype))
    return b.problem(b.permute(0, *axes))


def and_transposed(shape=(3, 40, 40), dtype="float16"):
    """x + 2 xᵀ and a row: what is read along both axes, and along one of them only."""
    b = Builder((shape, dtype), (shape[-1:], dtype), ((shape[-2], 1), dtype))
    turned = b.add("multiply", b.permute(0, 0, 2, 1), b.number(2.0, dtype))
    total = b.add("add", b.add("add", 0, turned), 1)
    return b.problem(b.add("gelu", b.add("add", total, 2)))


def plus_transposed(shape=(3, 77, 77), dtype="float16"):
    """x + xᵀ + a row, whose rows begin anywhere."""
    b = Builder((shape, dtype), (shape[-1:], dtype))
    return b.problem(b.add("add", b.add("add", 0, b.permute(0, 0, 2, 1)), 1))


def cut_and_merged(shape=(2, 70, 5, 33), dtype="float16"):
    """A part that begins anywhere, permuted, as a matrix."""
    b = Builder((shape, dtype))
    x = b.permute(b.cut(0, 1, 3, shape[1]), 0, 3, 2, 1)
    batch, *rest = b.of(x).shape
    return b.problem(b.reshape(x, batch * rest[0], rest[1] * rest[2]))


def parts_of_sums(count=4, dtype="float16"):
    """Sums of one vector with several tables, and two parts of each: PixArt's shifts, scales and gates."""
    b = Builder(((1, 6 * 40), dtype), *[((6, 40), dtype)] * count)
    sums = [b.add("add", b.reshape(0, 1, 6, 40), b.reshape(1 + i, 1, 6, 40)) for i in range(count)]
    return b.problem(*sums, *(b.cut(x, 1, part, part + 1) for x in sums for part in (2, 5)))


def padded_rows(c=80, length=50, kernel=3, stride=2, dtype="float16"):
    """The rows that a convolution along the length multiplies by its weights."""
    b = Builder(((2, c, length), dtype))
    wide = b.permute(b.pad(0, 0.0, (0, 0), (0, 0), (1, 1)), 0, 2, 1)
    count = (length + 2 - kernel) // stride + 1
    return b.problem(b.concat(-1, *(b.cut(wide, 1, j, j + (count - 1) * stride + 1, stride) for j in range(kernel))))


def depthwise(*lengths: int, n=2, c=64, kernel=3, stride=1, dtype="float16"):
    """A depthwise convolution between half a kernel of zeros, its bias and a GELU."""
    half = kernel // 2
    counts = [(length + 2 * half - kernel) // stride + 1 for length in lengths]
    weight = *(m for _ in lengths for m in (1, kernel)), c
    b = Builder(((n, *lengths, c), dtype), (weight, dtype), ((c,), dtype))
    x = b.pad(0, 0.0, (0, 0), *((half, half) for _ in lengths), (0, 0))
    for i, count in enumerate(counts):
        axis, own = 1 + 2 * i, list(b.of(x).shape)
        own[axis : axis + 1] = [count, kernel]
        x = b.add("take", x, shape=own, numbers=(axis, 0, stride, 1))
    axes = [2 + 2 * i for i in range(len(lengths))]
    x = b.add("sum", b.add("multiply", x, 1), shape=(n, *counts, c), numbers=axes, dtype=dtype)
    return b.problem(b.add("gelu", b.add("add", x, 2)))


def windows(shift=3, size=24, width=96, window=7, dtype="float16"):
    """Swin's: the norm of an image's rows, padded, rolled, and cut into windows."""
    whole = -(-size // window) * window
    b = Builder(((2, size, size, width), dtype), ((width,), dtype), ((width,), dtype))
    x = b.norm("layer_norm", 0, 1, 2)
    x = b.pad(x, 0.0, (0, 0), (0, whole - size), (0, whole - size), (0, 0))
    for axis in (1, 2):
        x = b.add("roll", x, shape=b.of(x).shape, numbers=(axis, shift))
    count = whole // window
    x = b.permute(b.reshape(x, 2, count, window, count, window, width), 0, 1, 3, 2, 4, 5)
    return b.problem(b.reshape(x, 2 * count * count, window, window, width))


def unfolded(c=48, length=61, kernel=8, stride=3, dtype="float16"):
    """All places of a convolution's kernel beside each other."""
    b = Builder(((2, length, c), dtype))
    count = (length - kernel) // stride + 1
    taken = b.add("take", 0, shape=(2, count, kernel, c), numbers=(1, 0, stride, 1))
    return b.problem(b.reshape(taken, 2, count, kernel * c))


def gathered(length=40, places=24, dtype="float16", transposed=True, index="int64"):
    """DeBERTa's: scores of relative positions, gathered along their last dimension, some of them transposed."""
    b = Builder(((3, length, places), dtype), ((3, length, places), dtype), ((1, length, length), index))
    total = None
    for x in (0, 1):
        places = b.add("broadcast", 2, shape=(3, length, length))
        places = b.add("maximum", places, b.number(0, index))
        found = b.add("gather", x, places, shape=(3, length, length), dtype=dtype, numbers=(2,))
        found = b.permute(found, 0, 2, 1) if x and transposed else found
        total = found if total is None else b.add("add", total, found)
    return b.problem(b.add("divide", total, b.number(8.0, dtype)))


def read_of_parts(how="gather", joined=True, length=13, places=9, dtype="float32", index="int64"):
    """Elements, or rows, at places of what has several parts: two tensors that are joined, or one that is padded.

    The kernel reads a place for each element, and branches by the part in which it lies.
    """
    b = Builder(((3, length), dtype), ((3, 2), dtype), ((3, places) if how == "gather" else (places,), index))
    x = b.concat(1, 1, 0) if joined else b.pad(0, 0.5, (0, 0), (2, 1))
    at = b.add("maximum", 2, b.number(0, index))
    found = b.add(how, x, at, shape=(3, places), dtype=dtype, numbers=(1,) if how == "gather" else (1, 0))
    return b.problem(b.add("subtract", found, b.number(0.25, dtype)))


def rows_of(x, b, places, is_missing=0, axis=0):
    """Slices of x at places."""
    shape = b.of(x).shape
    numbers = axis, is_missing
    taken = (*shape[:axis], *b.of(places).shape, *shape[axis + 1 :])
    return b.add("rows", x, places, shape=taken, dtype=b.of(x).dtype, numbers=numbers)


def sorted_rows(tokens=40, k=4, n=96, dtype="float16", is_missing=0, index="int64"):
    """The row of a token for each of its choices, in an order of the choices."""
    b = Builder(((tokens, n), dtype), ((tokens * k,), index))
    places = b.add("floor_divide", 1, b.number(k, index))
    return b.problem(rows_of(0, b, places, is_missing))


def weighted_sum(tokens=40, k=4, n=96, dtype="float16", is_missing=0, index="int64", normed=False):
    """Rows times their weights, put back to the order of tokens and added up, as experts' results are.

    With `normed`, the residual sum follows, and its norm.
    """
    count = tokens * k
    more = [((tokens, n), dtype), ((n,), dtype)] if normed else []
    b = Builder(((count, n), dtype), ((count,), dtype), ((count,), index), ((count,), index), *more)
    inverse = b.add("maximum", 3, b.number(0, index))
    weighted = b.add("multiply", 0, b.reshape(rows_of(1, b, b.add("maximum", 2, b.number(0, index))), count, 1))
    back = b.reshape(rows_of(weighted, b, inverse, is_missing), tokens, k, n)
    total = b.add("sum", b.cast(back, "float32"), shape=(tokens, n), numbers=(1,))
    total = b.cast(total, dtype)
    if not normed:
        return b.problem(total)
    stream = b.add("add", 4, total)
    return b.problem(stream, b.norm("rms_norm", stream, 5))


def normalized(rows=30, k=6, dtype="float16"):
    """Weights divided by their sum along the last dimension, and the number of them above a bound."""
    b = Builder(((rows, k), "float32"))
    total = b.add("sum", 0, shape=(rows,), numbers=(1,))
    share = b.cast(b.add("divide", 0, b.reshape(b.add("maximum", total, b.number(1.0, "float32")), rows, 1)), dtype)
    above = b.cast(b.add("greater", 0, b.number(0.5, "float32")), "int32")
    return b.problem(share, b.add("sum", above, shape=(rows,), dtype="int32", numbers=(1,)))


def counted(bins=64, count=32768, index="int64", dtype="int32", within=2):
    """How many elements are up to each of some numbers, and not negative."""
    b = Builder(((count,), index), ((bins, 1), index))
    place = b.add("minimum", 0, b.number(within, index))
    inside = b.add("logical_and", b.add("less_equal", place, 1), b.add("greater_equal", place, b.number(0, index)))
    total = b.add("sum", b.cast(inside, "int32"), shape=(bins,), numbers=(1,))
    return b.problem(b.cast(total, dtype))


def pooled(batch=3, length=40, n=1000, dtype="float16"):
    """The sum of a product of each row with a vector, halved, in another shape; and the same, negative."""
    b = Builder(((batch, length, n), dtype), ((n,), dtype))
    product = b.cast(b.add("multiply", 0, 1), "float32")
    total = b.add("sum", product, shape=(batch, length), dtype="float32", numbers=(2,))
    half = b.reshape(b.add("multiply", total, b.number(1 / 64, "float32")), batch, 1, length)
    return b.problem(b.cast(half, dtype), b.cast(b.add("negative", total), "float32"))


def columns_of(rows=6, n=40, places=(3, 5), dtype="bfloat16"):
    """Columns of a matrix at places that are no vector."""
    b = Builder(((rows, n), dtype), (places, "int32"))
    return b.problem(b.add("negative", rows_of(0, b, b.add("abs", 1), axis=1)))


def modulated(n=768, dtype="float16", kind="layer_norm", m=131):
    """A residual sum, its norm, and a scale and a shift for each sample; the sum is a result, too."""
    vectors = [((n,), dtype)] * 2
    b = Builder(((2, m, n), dtype), ((2, m, n), dtype), *vectors, ((2, 6 * n), dtype))
    total = b.add("add", 0, 1)
    shift, scale = (b.reshape(b.cut(4, -1, i * n, (i + 1) * n), 2, 1, n) for i in (0, 1))
    normed = b.norm(kind, total, 2, 3 if kind == "layer_norm" else None)
    more = b.add("add", scale, b.number(1.0, dtype))
    return b.problem(b.add("add", b.add("multiply", normed, more), shift), total)


def reordered(n=1536, m=131, dtype="bfloat16"):
    """Tokens in another order, their norm in float32, and a scale and a shift, as before a video model's attention."""
    b = Builder(((1, m, n), dtype), ((m,), "int64"), ((n,), "float32"), ((n,), "float32"), ((1, 2, n), "float32"))
    taken = rows_of(0, b, b.add("minimum", 1, b.number(m - 1, "int64")), axis=1)
    normed = b.norm("layer_norm", b.cast(taken, "float32"), 2, 3)
    shift, scale = (b.cut(4, 1, i, i + 1) for i in (0, 1))
    scaled = b.add("multiply", normed, b.add("add", scale, b.number(1.0, "float32")))
    return b.problem(b.cast(b.add("add", scaled, shift), dtype))


def masked(dtype="float16", n=40):
    """Comparisons, booleans, integers, and a selection."""
    b = Builder(((2, 5, n), dtype), ((2, 5, n), "bool"), ((2, 1, n), "int64"), ((5, 1), "int32"))
    late = b.add("greater", b.cast(2, "int32"), 3)
    keep = b.add("logical_or", b.add("logical_and", 1, late), b.add("less", 0, b.number(-1.0, dtype)))
    other = b.add("maximum", b.cast(b.add("add", 2, b.number(2, "int64")), dtype), b.number(0.5, dtype))
    return b.problem(b.add("where", b.add("logical_not", keep), b.add("abs", 0), other))


def markers(n=72, kind="int64"):
    """Whether an element is another than 1, as two kinds of integers: RoBERTa's positions are made of such."""
    b = Builder(((2, n), kind))
    is_other = b.add("logical_not", b.add("equal", 0, b.number(1, kind)))
    return b.problem(b.cast(is_other, "int32"), b.cast(b.cast(is_other, "int32"), kind))


def sinusoids(dtype="float16", n=128, batch=3):
    """Sines and cosines of a time up to some thousands, at frequencies of a table, as diffusion models embed it."""
    b = Builder(((batch, 1), "float32"), ((1, n), "float32"))
    angles = b.add("multiply", b.add("multiply", 0, 1), b.number(1000.0, "float32"))
    return b.problem(b.cast(b.concat(-1, b.add("cos", angles), b.add("sin", angles)), dtype))


def every_operator(dtype="float16"):
    """Each operator of one float, summed; the arguments of roots are positive."""
    b = Builder(((3, 7, 24), dtype), ((24,), dtype))
    positive = b.add("add", b.add("square", 0), b.number(0.1, dtype))
    approximate = ("exp", "erf", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu") if dtype != "float32" else ()
    terms = [b.add(name, 0) for name in ("negative", "relu", *approximate)]
    terms += [b.add(name, positive) for name in ("sqrt", "rsqrt")]
    terms += [b.add("divide", 1, positive), b.add("minimum", 0, 1), b.add("clip", 0, numbers=(-0.5, 0.25))]
    total = terms[0]
    for term in terms[1:]:
        total = b.add("add", b.add("multiply", total, b.number(0.5, dtype)), term)
    return b.problem(total)


def group_cases() -> list[GroupCase]:
    target = parse_target("cuda -arch=sm_80")
    every = {
        "rotation": packed_rotation(),
        "rotation, norm of heads": packed_rotation(norms="head", dim=128),
        "rotation, norm of rows": packed_rotation(norms="row", heads=12, kv_heads=4),
        "gated halves": gated_halves(),
        "modulated": modulated(),
    }
    one = {
        "rotation, bfloat16": packed_rotation("bfloat16", 3, 3, 80, table="bfloat16"),
        "rotation, float32": packed_rotation("float32"),
        "partial rotation": partial_rotation(),
        "partial rotation of 20": partial_rotation(turned=20),
        "interleaved rotation": interleaved_rotation(),
        "interleaved rotation, norm of rows": interleaved_rotation("bfloat16", 128, is_normed=True),
        "reordered tokens": reordered(),
        "gated halves, odd": gated_halves(77, activation="silu"),
        "gated halves, interleaved": gated_halves(96, "bfloat16", "gelu_tanh", interleaved=True),
        "class token": class_token(),
        "class token, odd": class_token(77, 5, "bfloat16"),
        "transposed": transposed(),
        "transposed, one row": transposed((1, 3, 5), (2, 0, 1), "float32"),
        "transposed matrix": transposed((3, 96, 200), (0, 2, 1)),
        "transposed, two steps": transposed((2, 24, 40, 16), (3, 0, 2, 1), "bfloat16"),
        "heads": transposed((3, 29, 6, 64), (0, 2, 1, 3)),
        "rows of a convolution": padded_rows(),
        "rows of a convolution, odd": padded_rows(9, 31, 5, 1, "float32"),
        "gathered": gathered(),
        "gathered, int32": gathered(256, 512, index="int32"),
        "transposed and not": and_transposed(),
        "rows of tokens": sorted_rows(4096, 8, 2048, "bfloat16"),
        "rows of tokens, odd": sorted_rows(17, 3, 77, "float32", index="int32"),
        "weighted sum of rows": weighted_sum(4096, 8, 2048, "bfloat16"),
        "weighted sum of rows, odd": weighted_sum(13, 2, 45, "float32", index="int32"),
        "weighted sum of rows, normed": weighted_sum(4096, 8, 2048, "bfloat16", normed=True),
        "normalized weights": normalized(4096, 8, "bfloat16"),
        "normalized weights, odd": normalized(31, 3),
        "columns": columns_of(),
        "transposed matrix, large": transposed((8, 1024, 768), (0, 2, 1), "bfloat16"),
        "transposed matrix, float32": transposed((2, 72, 40), (0, 2, 1), "float32"),
        "gathered, odd": gathered(21, 5, "bfloat16"),
        **{f"reversed, {x}": transposed((6, 40, 24, 72), (3, 2, 1, 0), x) for x in ("float16", "int8", "float64")},
        **{f"reversed, odd, {x}": transposed((5, 33, 7, 61), (3, 2, 1, 0), x) for x in EVERY_SIZE},
        **{f"transposed matrix, odd, {x}": transposed((3, 213, 327), (0, 2, 1), x) for x in EVERY_SIZE},
        **{f"transposed matrix, large, {x}": transposed((1, 4096, 4096), (0, 2, 1), x) for x in EVERY_SIZE},
        "transposed matrix, one odd": transposed((1, 512, 5027), (0, 2, 1)),
        "transposed matrix, the other odd": transposed((1, 5027, 512), (0, 2, 1)),
        "narrow": transposed((40, 3, 1000), (0, 2, 1)),
        "narrow, back": transposed((40, 1000, 3), (0, 2, 1), "bfloat16"),
        "narrow, even": transposed((40, 1000, 32), (0, 2, 1)),
        "heads of 63": transposed((3, 129, 6, 63), (0, 2, 1, 3)),
        "markers": markers(),
        "heads, int64": transposed((3, 29, 6, 64), (0, 2, 1, 3), "int64"),
        "windows of 7": transposed((4, 64, 7, 7, 32), (0, 4, 1, 2, 3)),
        "cut and merged": cut_and_merged(),
        "cut and merged, bool": cut_and_merged(dtype="bool"),
        "plus transposed": plus_transposed(),
        "plus transposed, float32": plus_transposed((3, 1001, 1001), "float32"),
        "parts of sums": parts_of_sums(),
        "windows": windows(),
        "windows, one row for each": windows(shift=2, size=14),
        "depthwise": depthwise(19, 23),
        "depthwise, strided": depthwise(20, 17, c=40, kernel=5, stride=2, dtype="bfloat16"),
        "depthwise, odd channels": depthwise(9, 14, c=21),
        "depthwise, one axis": depthwise(203, c=72, kernel=4),
        "unfolded": unfolded(),
        "unfolded, odd": unfolded(7, 20, 3, 2, "bfloat16"),
        "modulated, rms": modulated(776, "bfloat16", "rms_norm"),
        "modulated, wide": modulated(8192, "float16", m=3),
        "modulated, float32": modulated(200, "float32"),
        "sinusoids": sinusoids(),
        "sinusoids, odd": sinusoids("bfloat16", 13, 5),
        "masked": masked(),
        "masked, odd": masked("bfloat16", 13),
        **{f"every operator, {dtype}": every_operator(dtype) for dtype in ("float16", "bfloat16", "float32")},
    }
    cases = [
        GroupCase(name, problem, config)
        for name, problem in every.items()
        for config in group_cuda.configs(problem, target)
    ]
    sums = {
        "counts": counted(),
        "counts, odd": counted(9, 1003, "int32", "int64"),
        "sums of rows": pooled(4, 512, 2048, "bfloat16"),
        "sums of rows, odd": pooled(3, 7, 61, "float32"),
    }
    for name, problem in sums.items():
        configs = reduce_cuda.configs(problem, target)
        cases += [GroupCase(name, problem, config) for config in (configs if name == "counts, odd" else configs[:1])]
    return cases + [GroupCase(name, problem, group_cuda.configs(problem, target)[0]) for name, problem in one.items()]
