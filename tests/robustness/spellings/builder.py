"""Writes a program statement by statement, and runs each at once: what PyTorch refuses is never written."""

import math
import re
from random import Random

import torch
from torch import nn
from torch.nn import functional as F

from tests.robustness.spellings.program import USER_MASK, Program

LARGEST = 1 << 15  # elements of a tensor
NAMES = ("B", "H", "G", "S", "T", "D", "E", "C")


class Refused(Exception):
    """PyTorch does not compute what was to be written, or the result is nothing to go on with."""


class Builder:
    """`let` writes an assignment, `do` any other statement; `attempt` takes back what was written if something fails.

    Tensors are known by their names: `value(name)` is what one holds for the first inputs.
    """

    def __init__(self, rng: Random, sizes: dict[str, int], dtype: str, seed: int, mask: str | None = None):
        self.rng, self.sizes, self.dtype, self.seed, self.mask = rng, sizes, dtype, seed, mask
        self.inputs: list[tuple[str, str]] = []
        self.setup: list[str] = []
        self.body: list[str] = []
        self.features: list[str] = []
        self.count = 0
        self.extra: list[str] = []  # results beside the last one
        self.history: list[str] = []
        self.sites = self.masked_sites = 0
        self.wild = False  # whether inputs may hold NaN and infinities
        self.nan = False  # whether results may hold NaN
        self.unmasked = False  # whether no attention may be masked
        self.only: str | None = None  # the feature that is asked for
        self.space: dict = {"math": math, "torch": torch, "nn": nn, "F": F, "self": nn.Module(), **sizes}
        self.space["DTYPE"] = eval(dtype, {"torch": torch})
        if mask:
            exec("from stof_tvm import masks\n" + USER_MASK.format(mask=mask), self.space)
        torch.manual_seed(seed)

    def value(self, name: str) -> torch.Tensor:
        return getattr(self.space["self"], name[5:]) if name.startswith("self.") else self.space[name]

    def knows(self, name: str) -> bool:
        """Whether what a name stands for is still written: attempts are taken back."""
        written = f"{name} = "
        return any(n == name for n, _ in self.inputs) or any(line.startswith(written) for line in self.body)

    def name(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def let(self, expression: str) -> str:
        name = self.name()
        self.do(f"{name} = {expression}")
        value = self.space.get(name)
        if isinstance(value, torch.Tensor):
            if not 0 < value.numel() <= LARGEST:
                raise Refused(f"{expression}: {value.numel()} elements")
            if not self.nan and value.is_floating_point() and value.isnan().any():
                raise Refused(f"{expression}: NaN")
            if value.is_complex() and "complex" not in expression and "polar" not in expression:
                raise Refused("complex")
        return name

    def do(self, statement: str) -> None:
        self._refuse_undefined(statement)
        try:
            with torch.no_grad():
                exec(statement, self.space)
        except Exception as error:
            raise Refused(f"{statement}: {error}") from error
        self.body.append(statement)

    def _refuse_undefined(self, statement: str) -> None:
        """C++ does not define what a float out of an integer's range is as that integer, and PyTorch follows it."""
        casts = r"((?:self\.)?\w+)(?:\.\w+\(\))*\.(?:to\(torch\.)?(u?int\d*|long)\(?\)"
        for name, dtype in re.findall(casts, statement):
            value = self.value(name) if name in self.space or name.startswith("self.") else None
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value, limits = value.double(), torch.iinfo(getattr(torch, dtype))
                if self.wild or not ((value > float(limits.min) - 1) & (value < float(limits.max))).all():
                    raise Refused(f"{statement}: out of range")

    def input(self, expression: str) -> str:
        name = self.name("x")
        self._run(f"{name} = {expression}")
        self.inputs.append((name, expression))
        return name

    def state(self, expression: str, kind: str = "buffer") -> str:
        """A buffer, parameter, submodule or plain attribute (`kind` "module", "constant") of the model."""
        name = self.name("p")
        form = {
            "buffer": 'self.register_buffer("{n}", {e})',
            "parameter": "self.{n} = nn.Parameter({e})",
            "module": "self.{n} = {e}",
            "constant": "self.{n} = {e}",
        }[kind].format(n=name, e=expression)
        self._run(form)
        self.space["self"].to(self.space["DTYPE"]).eval()
        self.setup.append(form)
        return f"self.{name}"

    def weights(self, *shape: str, scale: float = 1.0) -> str:
        """A float parameter, or buffer."""
        factor = "" if scale == 1.0 else f" * {scale}"
        return self.state(f"torch.randn({', '.join(shape)}){factor}", self.rng.choice(("parameter", "buffer")))

    def _run(self, statement: str) -> None:
        try:
            with torch.no_grad():
                exec(statement, self.space)
        except Exception as error:
            raise Refused(f"{statement}: {error}") from error

    def attempt(self, write, *arguments, tries: int = 8):
        """What `write(self, *arguments)` returns; None where it was refused `tries` times."""
        for _ in range(tries):
            before = len(self.inputs), len(self.setup), len(self.body), len(self.features), self.masked_sites
            try:
                return write(self, *arguments)
            except (Refused, IndexError, ValueError, ZeroDivisionError):  # or an axis is asked for that is not there
                for items, length in zip((self.inputs, self.setup, self.body, self.features), before):
                    del items[length:]
                self.masked_sites = before[-1]
        return None

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, choices):
        return self.rng.choice(choices)

    def size(self, n: int) -> str:
        """A size as one of the names, or as a number."""
        return next((name for name in NAMES if self.sizes.get(name) == n), str(n))

    def shape(self, name: str) -> list[str]:
        return [self.size(n) for n in self.value(name).shape]

    def number(self) -> str:
        """A Python scalar as people write them, near misses of famous ones among them."""
        return self.pick(
            (
                "0.5",
                "2.0",
                "-1.0",
                "0.125",
                "3",
                "-2",
                "0.1",
                "1.702",
                "0.7",
                "1",
                "0",
                "1e-3",
                "math.pi",
                "True",
                "7.0",
            )
        )

    def finish(self, results: list[str], origin: str) -> Program:
        used = dict.fromkeys(results)
        return Program(
            tuple((name, "H * D" if name == "C" else size) for name, size in self.sizes.items()),
            tuple(self.inputs),
            tuple(self.setup),
            tuple(self.body),
            tuple(used),
            self.dtype,
            self.mask if self.masked_sites else None,
            self.seed,
            tuple(dict.fromkeys(self.features)),
            origin,
        )
