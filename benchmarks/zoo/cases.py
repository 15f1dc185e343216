"""The cases that are measured: a model of the zoo, a batch size and a length."""

from dataclasses import asdict, dataclass

from benchmarks.zoo.models import MODELS


@dataclass(frozen=True, order=True)
class ZooCase:
    """One forward of a model; what `length` counts is the model's (models.py)."""

    model: str
    batch: int
    length: int
    dtype: str = "float16"

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.length}"

    @property
    def label(self) -> str:
        return f"{self.model} {self.shape}"

    def to_json(self) -> dict:
        """The `case` object of a result row."""
        return asdict(self)

    @staticmethod
    def from_row(row: dict) -> "ZooCase":
        return ZooCase(**row["case"])


def zoo_cases() -> list[ZooCase]:
    return [ZooCase(name, *shape) for name, model in MODELS.items() for shape in model.shapes]


def tiny(case: ZooCase) -> ZooCase:
    """The case that stands for all of its model in a dry run."""
    return ZooCase(case.model, 1, MODELS[case.model].tiny_length, case.dtype)
