"""Several functions of the same inputs as one model: one build for all of them."""

import torch

from stof_tvm.frontend import import_model
from tests.models.running import compile_imported, largest_error


class Functions(torch.nn.Module):
    """Gives the tuple of what its functions give."""

    def __init__(self, functions):
        super().__init__()
        self.functions = list(functions)

    def forward(self, *tensors):
        return tuple(function(*tensors) for function in self.functions)


def errors(functions: dict, inputs: tuple, decomposed: bool = False) -> dict[str, float]:
    """`largest_error` by name; an exported program of somebody else is decomposed before it is imported."""
    model = Functions(functions.values())
    imported = import_model(torch.export.export(model, inputs)) if decomposed else import_model(model, inputs)
    results = compile_imported(imported)(*inputs)
    return {name: largest_error(got, functions[name](*inputs)) for name, got in zip(functions, results)}


def message(function, *inputs) -> str:
    """The message of the error with which the import of a function ends."""
    try:
        import_model(Functions([function]), inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
