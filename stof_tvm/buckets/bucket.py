"""One engine of a range: its inputs are padded to its sizes, and what is padding is cut off its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from stof_tvm.engine import Engine
from stof_tvm.frontend.padding.dims import Dim, Number, at, length
from stof_tvm.frontend.padding.program import PaddedProgram
from stof_tvm.frontend.shape_range import ShapeRange

CONTIGUOUS = torch.contiguous_format


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that is no padding: the sizes of its factors, how much of each, and the shape of that."""

    factors: tuple[int, ...]
    kept: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(dims: Sequence[Dim], sizes: Mapping, numbers: Mapping) -> "Cut":
        """The part for a call's `numbers`, of a tensor at the bucket's `sizes`."""
        factors = [factor for dim in dims for factor in (dim or (1,))]
        return Cut(
            tuple(at(factor, sizes) for factor in factors),
            tuple(at(factor, numbers) for factor in factors),
            tuple(at(length(dim), numbers) for dim in dims),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A view of the part where there is one, else a copy; the tensor itself if it is all of it."""
        if self.factors == self.kept:
            return x
        x = x.reshape(self.factors)
        return x[tuple(slice(0, n) for n in self.kept)].reshape(self.shape)


@dataclass(frozen=True)
class Plan:
    """What a call of some shapes does: the numbers that it brings, and the parts of its results."""

    bucket: "Bucket"
    numbers: dict[str, torch.Tensor]
    results: tuple

    def cut(self, leaves: list) -> list:
        """The parts of a padded program's results, and the numbers among them for this call."""
        return [part(x) if isinstance(part, Cut) else part for part, x in zip(self.results, leaves, strict=True)]


class Bucket:
    """A program at one of a range's sizes, and its engine.

    Attributes
    ----------
    padded : PaddedProgram
    shapes : tuple of tuples of int
        Of the padded inputs.
    sizes : dict
        The number of each of the program's symbols.
    engine : Engine
        Takes the padded inputs, then the program's numbers.
    """

    engine: Engine

    def __init__(self, padded: PaddedProgram, shapes: ShapeRange, sizes: Mapping):
        self.padded, self.sizes = padded, dict(sizes)
        self.shapes = tuple(tuple(at(size, sizes) for size in shape) for shape in shapes.shapes)
        self._buffers: dict[int, torch.Tensor] = {}  # padded inputs, kept from call to call

    def plan(self, numbers: Mapping, device: torch.device) -> Plan:
        """What a call with these numbers for the program's symbols does."""
        results: list = []
        for known in self.padded.outputs:
            if isinstance(known, tuple):
                results.append(Cut.of(known, self.sizes, numbers))
            else:
                results.append(known.at(numbers) if isinstance(known, Number) else known)
        brought = {name: x.to(device) for name, x in self.padded.numbers(numbers).items()}
        return Plan(self, brought, tuple(results))

    def warm_up(self, device: torch.device) -> None:
        """Run the engine on zeros: on a GPU that loads its kernels, and captures and replays its graph."""
        values = [
            torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
            for shape, spec in zip(self.shapes, self.engine.signature.inputs)
        ]
        plan = self.plan(self.sizes, device)
        for _ in range(2):
            self.run(plan, values, True)

    def run(self, plan: Plan, values: list[torch.Tensor], reuse_outputs: bool):
        """What the model returns.  InputError for inputs on another device."""
        engine = self.engine
        engine._check_device([*values, *plan.numbers.values()])
        is_kept = engine.device_type == "cuda"  # results lie in the engine's memory
        engine.reuse_outputs = is_kept
        with engine._turn() as store:
            inputs = [self._padded(number, x) for number, x in enumerate(values)]
            outputs = engine._run(engine.signature.checked([*inputs, *plan.numbers.values()]), store)
            leaves = []
            for leaf, part in zip(engine.signature.out_leaves, plan.results, strict=True):
                if leaf.tensor is None or not isinstance(part, Cut):
                    leaves.append(part)
                    continue
                x = part(outputs[leaf.tensor])
                is_own = x is outputs[leaf.tensor] and not is_kept
                leaves.append(x if is_own or (is_kept and reuse_outputs) else x.clone(memory_format=CONTIGUOUS))
        return pytree.tree_unflatten(leaves, engine.signature.out_spec)

    def filled(self, number: int, x: torch.Tensor, fill: float) -> torch.Tensor:
        """Input `number` in a new tensor of the bucket's sizes, its padding `fill`, or 0 where it is no float."""
        padded = torch.full(self.shapes[number], fill if x.dtype.is_floating_point else 0, dtype=x.dtype)
        padded[tuple(slice(0, n) for n in x.shape)].copy_(x.detach())
        return padded.to(x.device)

    def _padded(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """An input at the bucket's sizes: zeros where the call has none."""
        shape = self.shapes[number]
        if tuple(x.shape) == shape:
            return x
        if number not in self._buffers:
            with torch.inference_mode(False):
                self._buffers[number] = torch.empty(shape, dtype=x.dtype, device=x.device)
        buffer = self._buffers[number].zero_()
        buffer[tuple(slice(0, n) for n in x.shape)].copy_(x)
        return buffer
