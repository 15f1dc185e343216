"""Random elementwise groups of small tensors: views, operators of every kind, casts, at most one norm."""

import math

import numpy as np

from tests.gpu.group_cases import Builder
from tir_kernels.fusion.group.problem import GroupProblem

UNARY = ("negative", "abs", "relu", "tanh", "sigmoid", "gelu", "silu")
BINARY = ("add", "subtract", "multiply", "maximum", "minimum")
VIEWS = ("reshape", "permute", "slice", "concat", "pad", "broadcast", "take", "roll")
APPROXIMATE = ("tanh", "sigmoid", "gelu", "silu")


def random_group(seed: int) -> GroupProblem:
    """A group of 5 to 12 operators; the same for the same seed."""
    return _Random(seed).problem()


class _Random:
    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.dtype = str(self.rng.choice(["float16", "bfloat16", "float32"]))
        shape = tuple(int(n) for n in self.rng.choice([1, 2, 3, 5], self.rng.integers(1, 4)))
        shape = (*shape, int(self.rng.choice([8, 16, 24, 40, 7, 13])))
        self.crosses = self.rng.random() < 0.3  # the last two axes change places
        if self.crosses:
            outer, last = self.rng.choice([1, 2, 3], len(shape) - 1), self.rng.choice([8, 16, 40, 21, 33], 2)
            shape = (*map(int, outer), *map(int, last))
        self.b = Builder((shape, self.dtype), (shape, self.dtype), (shape[-1:], "float32"))
        self.values = [0, 1]  # that operators read
        self.has_norm = False

    def problem(self) -> GroupProblem:
        for _ in range(self.rng.integers(5, 13)):
            self.values.append(self.one())
        if self.crosses and len(self.b.of(self.values[-1]).shape) >= 2:
            self.values.append(self.crossed(self.values[-1]))
        last = self.values[-1]
        computed = [value for value in self.values[2:-1]]
        more = [int(self.rng.choice(computed))] if computed and self.rng.random() < 0.3 else []
        return self.b.problem(*[self.stored(value) for value in (last, *more)])

    def stored(self, value: int) -> int:
        return value if self.b.of(value).dtype == self.dtype else self.b.cast(value, self.dtype)

    def one(self) -> int:
        recent = self.values[-3:]
        x = int(self.rng.choice(recent))
        kind = self.rng.choice(["unary", "binary", "view", "view", "cast", "where", "norm"])
        if kind == "norm" and self.b.of(x).shape[-1] % 8 == 0 and not self.has_norm:
            self.has_norm = True
            n = self.b.of(x).shape[-1]
            weight = 2 if self.b.of(2).shape == (n,) and self.rng.random() < 0.5 else None
            return self.b.norm(str(self.rng.choice(["layer_norm", "rms_norm"])), x, weight)
        if kind == "view":
            return getattr(self, str(self.rng.choice(VIEWS)))(x)
        if kind == "cast":
            return self.b.cast(x, str(self.rng.choice(["float32", self.dtype])))
        y = self.other(x)
        if kind == "binary":
            return self.b.add(str(self.rng.choice(BINARY)), x, y)
        if kind == "where":
            return self.b.add("where", self.b.add("less", x, self.b.number(0.25, self.b.of(x).dtype)), x, y)
        names = [name for name in UNARY if self.dtype != "float32" or name not in APPROXIMATE]
        return self.b.add(str(self.rng.choice(names)), x)

    def other(self, x: int) -> int:
        """A value that broadcasts to the shape of x."""
        shape = self.b.of(x).shape
        fits = [v for v in (*self.values, 2) if _broadcasts(self.b.of(v).shape, shape)]
        return self.b.number(0.75, self.dtype) if self.rng.random() < 0.1 else int(self.rng.choice(fits))

    def axis(self, x: int) -> int:
        return int(self.rng.integers(len(self.b.of(x).shape)))

    def reshape(self, x: int) -> int:
        shape = list(self.b.of(x).shape)
        axis = self.axis(x)
        if axis + 1 < len(shape) and self.rng.random() < 0.4:
            shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
        else:
            factors = [n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0]
            first = int(self.rng.choice(factors))
            shape[axis : axis + 1] = [first, shape[axis] // first]
        return self.b.reshape(x, *shape) if len(shape) <= 5 else self.b.reshape(x, math.prod(shape))

    def crossed(self, x: int) -> int:
        *outer, before, last = range(len(self.b.of(x).shape))
        return self.b.permute(x, *outer, last, before)

    def permute(self, x: int) -> int:
        return self.b.permute(x, *map(int, self.rng.permutation(len(self.b.of(x).shape))))

    def slice(self, x: int) -> int:
        axis = self.axis(x)
        n = self.b.of(x).shape[axis]
        first = int(self.rng.integers(n)) if self.rng.random() < 0.5 else n // 2
        first = min(first, n - 1)
        return self.b.cut(x, axis, first, n, int(self.rng.integers(1, 4)))

    def concat(self, x: int) -> int:
        if math.prod(self.b.of(x).shape) > 1500:
            return self.b.add("negative", x)
        same = [v for v in self.values if self.b.of(v).shape == self.b.of(x).shape]
        parts = [x, int(self.rng.choice(same)), self.b.add("negative", x)]
        self.rng.shuffle(parts)
        return self.b.concat(self.axis(x), *parts[: self.rng.integers(2, 4)])

    def pad(self, x: int) -> int:
        sides = [(0, 0) for _ in self.b.of(x).shape]
        sides[self.axis(x)] = tuple(map(int, self.rng.choice([0, 1, 3, 8], 2)))
        return self.b.pad(x, float(self.rng.choice([0.0, -1.5])), *sides)

    def broadcast(self, x: int) -> int:
        shape = list(self.b.of(x).shape)
        axis = self.axis(x)
        one = self.b.cut(x, axis, 0, 1)
        shape[axis] = int(self.rng.choice([1, 4, 8]))
        return self.b.add("broadcast", one, shape=shape)

    def take(self, x: int) -> int:
        """Windows along an axis, as an unfold."""
        shape, axis = list(self.b.of(x).shape), self.axis(x)
        n = shape[axis]
        size, stride = min(n, int(self.rng.integers(1, 4))), int(self.rng.integers(1, 4))
        count = (n - size) // stride + 1
        if len(shape) > 4 or math.prod(shape) > 1500:
            return self.slice(x)
        return self.b.add(
            "take", x, shape=[*shape[:axis], count, size, *shape[axis + 1 :]], numbers=(axis, 0, stride, 1)
        )

    def roll(self, x: int) -> int:
        axis = self.axis(x)
        first = int(self.rng.integers(self.b.of(x).shape[axis]))
        return self.b.add("roll", x, shape=self.b.of(x).shape, numbers=(axis, first))


def _broadcasts(shape, wanted) -> bool:
    return len(shape) <= len(wanted) and all(n in (1, m) for n, m in zip(shape[::-1], wanted[::-1]))
