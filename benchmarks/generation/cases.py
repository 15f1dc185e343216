"""The cases that are measured: tokens after long prompts, and the first token after a prompt."""

from dataclasses import asdict, dataclass

DECODE, FIRST = "decode", "first"
MODELS = ("Llama-3.2-1B", "Qwen3-0.6B")


@dataclass(frozen=True)
class Sizes:
    """What is measured: DECODE for each batch, cache and window, `new` tokens; FIRST after one prompt."""

    batches: tuple[int, ...] = (1, 16)
    caches: tuple[int, ...] = (4096, 8192, 16384, 32768)
    window: int = 1024
    new: int = 64
    prompt: int = 8192
    runs: int = 3


FULL = Sizes()
TINY = Sizes(batches=(1, 2), caches=(24,), window=8, new=4, prompt=16, runs=1)


@dataclass(frozen=True, order=True)
class GenerateCase:
    """Greedy generation by a model; `kind` is DECODE or FIRST.

    The `cache` holds prompt and new tokens; a token sees itself and those before it, `window` in all, or all for 0.
    """

    kind: str
    model: str
    batch: int
    cache: int
    new: int
    window: int
    dtype: str = "float16"

    @property
    def label(self) -> str:
        return (
            f"{self.kind} {self.model} {self.batch}x{self.cache} {f'window {self.window}' if self.window else 'causal'}"
        )

    @property
    def prompt(self) -> int:
        return self.cache - self.new

    def to_json(self) -> dict:
        """The `case` object of a result row."""
        return asdict(self)

    @staticmethod
    def from_row(row: dict) -> "GenerateCase":
        return GenerateCase(**row["case"])


def generate_cases(sizes: Sizes = FULL) -> list[GenerateCase]:
    """Every case, a model's next to each other."""
    cases = []
    for model in MODELS:
        cases.append(GenerateCase(FIRST, model, 1, sizes.prompt + 1, 1, sizes.window))
        for batch in sizes.batches:
            for cache in sizes.caches:
                cases += [GenerateCase(DECODE, model, batch, cache, sizes.new, window) for window in (0, sizes.window)]
    return cases
