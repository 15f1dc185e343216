"""The cases that are measured: models, batch sizes and lengths."""

from dataclasses import asdict, dataclass, replace

MODELS = ("bert", "gpt2", "llama", "t5-encoder", "vit")
SHAPES = ((1, 128), (1, 512), (8, 512), (16, 2048))


@dataclass(frozen=True, order=True)
class ModelCase:
    """One forward of a model; `q_len` counts tokens (a vision transformer's class token comes on top)."""

    model: str
    batch: int
    q_len: int
    mask: str = "bigbird"
    dtype: str = "float16"

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.q_len}"

    @property
    def label(self) -> str:
        return f"{self.model} {self.shape} {self.mask}"

    @property
    def sequence(self) -> int:
        """The length that attention sees."""
        return self.q_len + (self.model == "vit")

    def to_json(self, density: float | None) -> dict:
        """The `case` object of a result row."""
        return asdict(self) | {"density": density}

    @staticmethod
    def from_row(row: dict) -> "ModelCase":
        return ModelCase(**{name: value for name, value in row["case"].items() if name != "density"})


def model_cases() -> list[ModelCase]:
    return [ModelCase(model, *shape) for model in MODELS for shape in SHAPES]


def tiny(case: ModelCase) -> ModelCase:
    """The same case at a length that a CPU runs in no time: for dry runs."""
    return replace(case, batch=min(case.batch, 2), q_len=32)
