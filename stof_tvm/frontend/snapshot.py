"""A copy of a model as it is now, from which engines can be built later."""

import copy
from collections.abc import Iterable

import torch
from torch.utils.weak import TensorWeakRef

from stof_tvm.running.alignment import aligned
from stof_tvm.running.shared_tensors import SharedTensors
from tir_kernels.errors import UnsupportedError


class Snapshot:
    """A private copy of a model, and the weights of the engines that are built from it, each held once.

    Attributes
    ----------
    model : torch.nn.Module or torch.export.ExportedProgram
        The copy.  Later training of the model itself does not reach it.
    states : set of str
        Names of the buffers that calls update, as far as is known: a program that only reads one must not have it for a
        constant.

    Raises UnsupportedError for a model that cannot be copied.
    """

    def __init__(self, model: torch.nn.Module | torch.export.ExportedProgram):
        if isinstance(model, torch.export.ExportedProgram):
            self.model: torch.nn.Module | torch.export.ExportedProgram = _copied_program(model)
            own = [*self.model.state_dict.values(), *self.model.constants.values()]
            self._originals: list[TensorWeakRef] = []
        else:
            self.model = _copied_module(model)
            own = _tensors(self.model)
            self._originals = [TensorWeakRef(tensor) for tensor in _tensors(model)]
        self.states: set[str] = set()
        self._weights = SharedTensors()
        self._own = self._weights.shared(x.detach() for x in own if isinstance(x, torch.Tensor) and _is_as_kernels(x))

    def check(self, tensors: Iterable) -> None:
        """UnsupportedError where the copy reads `tensors` of the model itself, which may change."""
        originals = {_memory(x) for x in (ref() for ref in self._originals) if x is not None}
        if any(isinstance(x, torch.Tensor) and x.numel() and _memory(x) in originals for x in tensors):
            raise UnsupportedError(
                "a copy of the model reads weights of the model itself, as by a lambda that names it, and would change "
                "with it: export the model with dynamic shapes (torch.export.export) and build the exported program"
            )

    def shared(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """An engine's weights, each replaced by the copy's own or another engine's tensor of equal content."""
        return self._weights.shared(weights)


def _copied_module(model: torch.nn.Module) -> torch.nn.Module:
    try:
        copied = copy.deepcopy(model)
    except Exception as error:  # whatever a part of the model raises
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied, and lazy=True keeps a copy of the model: {error}.  Export it "
            "with dynamic shapes (torch.export.export) and build the exported program"
        ) from error
    for parameter in copied.parameters():
        parameter.grad = None
    return copied.eval()


def _copied_program(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with tensors of its own; those that share memory share it in the copy, too."""
    memo: dict = {}

    def own(x):
        if isinstance(x, torch.nn.Parameter):
            x = copy.deepcopy(x, memo)
            x.grad = None
            return x
        return copy.deepcopy(x.detach(), memo) if isinstance(x, torch.Tensor) else x

    copied = copy.copy(program)
    copied._state_dict = {name: own(x) for name, x in program.state_dict.items()}
    copied._constants = {name: own(x) for name, x in program.constants.items()}
    return copied


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and tensors that are attributes of modules."""
    attributes = (x for module in model.modules() for x in vars(module).values() if isinstance(x, torch.Tensor))
    return [*model.parameters(), *model.buffers(), *attributes]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _is_as_kernels(x: torch.Tensor) -> bool:
    """Whether compiled code for the CPU can read the tensor where it is."""
    return x.device.type == "cpu" and x.layout is torch.strided and x.is_contiguous() and aligned(x) is x
