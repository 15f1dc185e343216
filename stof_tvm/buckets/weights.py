"""The weights that the engines of a range have in common."""

import copy

import torch

from stof_tvm.running.shared_tensors import SharedTensors


class SharedWeights:
    """What engines of a range have in common; `build` takes it for a Snapshot.

    Attributes
    ----------
    known : list of Tensor
        Each weight of an engine once, in the order in which they came.
    """

    states: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.known: list[torch.Tensor] = []
        self._weights = SharedTensors(with_parts=True)
        self._copies: dict[tuple, torch.Tensor] = {}  # place, dtype and strides of a model's tensor -> our copy of it

    def check(self, tensors) -> None:
        """Nothing: the engines of a range are built at once."""

    def shared(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """An engine's weights, each replaced by another's tensor of equal content, or by a view of its beginning."""
        found = self._weights.shared(weights)
        known = set(map(id, self.known))
        self.known += [x for x in {id(x): x for x in found}.values() if id(x) not in known]
        return found

    def private(self, program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
        """The program with copies of its tensors on the CPU, so that engines may have the copies for their weights.

        Tensors elsewhere stay, for a program that is run where its model is: importing it copies them.
        """
        return self._with_copies(program, {"cpu"})

    def on_cpu(self, program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
        """The program with copies on the CPU of all its tensors, which is only read, and so in forks as well."""
        return self._with_copies(program, {"cpu", "cuda"})

    def _with_copies(self, program: torch.export.ExportedProgram, devices: set[str]) -> torch.export.ExportedProgram:
        program = copy.copy(program)
        program._state_dict = {name: self._copy(x, devices) for name, x in program.state_dict.items()}
        program._constants = {name: self._copy(x, devices) for name, x in program.constants.items()}
        return program

    def _copy(self, x, devices: set[str]):
        if not isinstance(x, torch.Tensor) or x.device.type not in devices:
            return x
        if x.layout is not torch.strided or x.is_quantized:
            return x  # importing it refuses it
        key = x.device, x.data_ptr(), x.dtype, tuple(x.shape), x.stride()
        if key not in self._copies:
            own = x.detach().to("cpu", copy=True)
            self._copies[key] = self._weights.shared([own])[0] if own.is_contiguous() else own
        own = self._copies[key]
        return torch.nn.Parameter(own, requires_grad=False) if isinstance(x, torch.nn.Parameter) else own
