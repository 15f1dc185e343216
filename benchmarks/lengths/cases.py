"""The cases that are measured: random lengths of three models, a batch of unequal lengths, the memory of a range."""

import math
import random
from dataclasses import asdict, dataclass

MODELS = ("BERT-base", "GPT-2", "ModernBERT-base")
BATCH_MODEL = "BERT-base"
LENGTH, BATCH, MEMORY = "length", "batch", "memory"
SIGMA = 0.8  # of the logarithm of a sentence's length
LEAST = 4  # tokens of a sentence


@dataclass(frozen=True)
class Sizes:
    """What is measured: `count` lengths in the range, `fixed` of them with an engine of their own, one batch."""

    shortest: int = 128
    longest: int = 4096
    count: int = 50
    fixed: int = 4
    batch: int = 32
    mean: int = 96
    longest_in_batch: int = 512

    def lengths(self) -> list[int]:
        """Random lengths, all different, the same in every process; their order is that of the first calls."""
        return random.Random(0).sample(range(self.shortest, self.longest + 1), self.count)

    def fixed_lengths(self) -> list[int]:
        """Some of the lengths, evenly from short to long."""
        known = sorted(self.lengths())
        return [known[(2 * i + 1) * len(known) // (2 * self.fixed)] for i in range(self.fixed)]

    def other_length(self) -> int:
        """A length in the range that is none of those that are measured."""
        return next(n for n in range(self.shortest, self.longest) if n not in self.lengths())

    def batch_lengths(self, seed: int = 0) -> list[int]:
        """Lengths of sentences, lognormal with `mean`; another seed gives the same in another order."""
        draw = random.Random(0)
        mu = math.log(self.mean) - SIGMA**2 / 2
        drawn = [round(draw.lognormvariate(mu, SIGMA)) for _ in range(self.batch)]
        drawn = [min(max(n, LEAST), self.longest_in_batch) for n in drawn]
        return random.Random(seed).sample(drawn, len(drawn))


FULL = Sizes()
TINY = Sizes(shortest=8, longest=24, count=3, fixed=1, batch=3, mean=8, longest_in_batch=16)


@dataclass(frozen=True, order=True)
class LengthCase:
    """Calls of a model at one length; `kind` is LENGTH, BATCH or MEMORY.

    The sequences of a BATCH have other lengths each, and the longest has this one.  MEMORY is the longest of the range,
    after calls of all lengths.
    """

    kind: str
    model: str
    batch: int
    length: int
    dtype: str = "float16"

    @property
    def label(self) -> str:
        return f"{self.kind} {self.model} {self.batch}x{self.length}"

    def to_json(self) -> dict:
        """The `case` object of a result row."""
        return asdict(self)

    @staticmethod
    def from_row(row: dict) -> "LengthCase":
        return LengthCase(**row["case"])


def length_cases(sizes: Sizes = FULL) -> list[LengthCase]:
    """Every case, a model's next to each other."""
    cases = []
    for model in MODELS:
        cases += [LengthCase(LENGTH, model, 1, length) for length in sizes.lengths()]
        cases.append(LengthCase(MEMORY, model, 1, sizes.longest))
    cases.append(LengthCase(BATCH, BATCH_MODEL, sizes.batch, max(sizes.batch_lengths())))
    return cases
