"""The engine for padded batches that computes real tokens only."""

import dataclasses
from collections.abc import Sequence

import torch

from stof_tvm.engine import IN_TRACED, Engine
from stof_tvm.frontend.packing.dims import TOKEN
from stof_tvm.frontend.packing.program import OF_SEQUENCES, OF_TOKENS, SHARED, Output
from stof_tvm.packed.layout import Layout, layout_of_lengths, layout_of_mask
from stof_tvm.packed.row_engines import Plan, RowEngine, RowEngines
from stof_tvm.report import Report, Verification
from stof_tvm.running.has_data import check_has_data
from stof_tvm.running.states import Store
from stof_tvm.signature import wrong_tensor
from tir_kernels.errors import InputError


class PackedEngine(Engine):
    """A model for padded batches that computes real tokens only.  `build` returns one with `without_padding`.

    It is called as the model is, with a batch of any number of sequences, padded on either side, whose padding mask
    tells their lengths.  Each sequence gets what the model gives for it alone.  The tokens of all sequences make one
    row, whose length is rounded up.  A row of a new length is compiled at its first call; other lengths of sequences
    are not.

    Attributes
    ----------
    longest : int
        The largest length of a sequence, that of the example.
    packed_outputs : bool
        False: outputs for tokens come back in the batch's shape, with zeros where it has padding.  True: as
        (tokens, …), one sequence after another.
    most_engines, most_layouts : int
        How many lengths of rows, and how many sets of sequences' lengths, are kept; the least recently used go.
    """

    def __init__(self, engines: RowEngines, target: str):
        self._rows, self._batched, self._target = engines, engines.batched, target
        self._device_type, self._index = engines.device.type, engines.device.index or 0
        self._verification: Verification | None = None
        self._packed_outputs = False
        self._store = Store()
        nodes = self._batched.placeholders()
        roles = self._batched.roles()
        self._values = {spec.name: nodes[spec.name].meta["val"] for spec in self.signature.inputs}
        self._of_tokens = [
            name for name, x in self._values.items() if any(roles.get(str(n)) == TOKEN for n in x.shape[1:2])
        ]

    def __call__(self, *args, lengths: Sequence[int] | torch.Tensor | None = None, **kwargs):
        """Run the model on a padded batch.

        Parameters
        ----------
        args, kwargs
            Those of the PyTorch model: tensors (batch, length, …) on the engine's device.
        lengths : sequence of int, optional
            The length of each sequence, padding coming after it.  The padding mask is then not read, and may be left
            out.  On a GPU this saves the wait for the mask.

        Raises
        ------
        InputError
            Inputs that do not fit, padding between tokens, a sequence of 0 or of more than `longest` tokens.
        StofError
            What `build` raises, where a row of another length is compiled.
        """
        padding, signature = self._batched.padding, self.signature
        if padding and padding not in kwargs and padding not in signature.positional[: len(args)]:
            if lengths is None:
                raise InputError(f"argument {padding!r} is missing: give it, or lengths=, the tokens of each sequence")
            kwargs = {**kwargs, padding: None}
        values = dict(zip(self._values, signature.arguments(args, kwargs), strict=True))
        layout = self._layout(values, lengths)
        plan = self._rows.plan(layout)
        packed = plan.compiled.packed
        with torch.no_grad(), plan.turn():
            results = plan.engine.run([self._packed(name, values, plan, layout) for name in packed.inputs])
            results = [results] if isinstance(results, torch.Tensor) else results
            outputs = [self._unpacked(*pair, plan, layout) for pair in zip(results, packed.outputs, strict=True)]
        return signature.unflatten(outputs)

    def run(self, values: list):
        """A call whose inputs are already in a list, `values`.  Returns and raises what a call does, as InputError."""
        args, kwargs = self.signature.nest_inputs(values)
        return self(*args, **kwargs)

    def example(self, args: tuple, kwargs: dict) -> tuple[Layout, tuple[Output, ...]]:
        """(the layout of an example call, without padding where the model has no padding mask; what each output is).

        `args` and `kwargs` are those of the call.  Compiles its engine.  Raises InputError as a call does.
        """
        values = dict(zip(self._values, self.signature.arguments(args, kwargs), strict=True))
        batch, width = values[self._of_tokens[0]].shape[:2]
        layout = self._layout(values, None if self.padding else [width] * batch)
        return layout, self._rows.compiled(layout).packed.outputs

    def alone(self, call: tuple, layout: Layout, row: int) -> tuple[tuple, dict]:
        """(args, kwargs) of the model for the sequence in one row of a call's batch; all of it is real.

        `call` is (args, kwargs), and `layout` tells where its sequences are.  Raises InputError as a call does.
        """
        values = dict(zip(self._values, self.signature.arguments(*call), strict=True))
        offset, length = layout.offsets[row], layout.lengths[row]
        for name, x in values.items():
            x = x[row : row + 1]
            x = x[:, offset : offset + length] if name in self._of_tokens else x
            values[name] = torch.full_like(x, self._batched.real) if name == self.padding else x
        return self.signature.nest_inputs(list(values.values()))

    # -- a call -------------------------------------------------------------------------------------------------------

    def _layout(self, values: dict, lengths) -> Layout:
        """Where the sequences are; InputError for inputs that do not fit the model or one another."""
        padding = self._batched.padding
        checked = [name for name in values if name != padding or lengths is None]
        if padding and values[padding] is None and lengths is None:
            raise InputError(f"give {padding}, or lengths=, which tell tokens from padding")
        if not padding and lengths is None:
            raise InputError("give lengths=, the length of each sequence: the model has no padding mask")
        first = values[self._of_tokens[0] if self._of_tokens[0] in checked else self._of_tokens[-1]]
        if not isinstance(first, torch.Tensor) or first.dim() < 2:
            raise InputError(f"{self._of_tokens[0]} must be a tensor of shape (batch, length, …)")
        batch, width = first.shape[:2]
        for name in checked:
            example, value = self._values[name], values[name]
            leading = (batch, width) if name in self._of_tokens else (batch,)
            shape = (*leading, *example.shape[len(leading) :])
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or value.dtype != example.dtype:
                raise wrong_tensor(name, str(example.dtype).removeprefix("torch."), shape, value)
            if value.device.type == self._device_type:  # else `_packed` says so
                check_has_data(name, value, IN_TRACED)
        if lengths is not None:
            layout = layout_of_lengths(lengths, batch, width)
        else:
            layout = layout_of_mask(values[padding], padding, self._batched.real)
        if max(layout.lengths) > self.longest:
            raise InputError(
                f"a sequence has {max(layout.lengths)} tokens; the example inputs had up to {self.longest}: build with "
                "a longer example"
            )
        return layout

    def _packed(self, name: str, values: dict, plan: Plan, layout: Layout) -> torch.Tensor:
        """An input of the row's program."""
        if name in plan.vectors:
            return plan.vectors[name]
        value = values[name].detach()
        if value.device.type != self._device_type or value.device.index not in (None, self._index):
            raise InputError(f"{name} is on {value.device}; the engine runs on {self._device_type}:{self._index}")
        if name in self._of_tokens:
            return value.reshape(-1, *value.shape[2:]).index_select(0, plan.taken)[None]
        rest = value[-1:].expand(plan.compiled.sequences - len(value), *value.shape[1:])
        return torch.cat([value, rest])

    def _unpacked(self, x: torch.Tensor, output: Output, plan: Plan, layout: Layout) -> torch.Tensor:
        """A result of the row's program as a result of the batch."""
        batch, width = layout.batch, layout.width
        if output.kind == OF_SEQUENCES:
            return x.narrow(output.batch, 0, batch).clone()
        if output.kind == SHARED:
            return x.expand(*x.shape[: output.batch], batch, *x.shape[output.batch + 1 :]).clone()
        if output.kind != OF_TOKENS:
            return x
        token, is_joined = output.token, output.token == output.batch
        if not is_joined:
            x = x.squeeze(output.batch)
            token -= output.batch < token
        x = x.movedim(token, 0)[: layout.tokens]
        if self._packed_outputs:
            return x.clone(memory_format=torch.contiguous_format)
        whole = x.new_zeros(batch * width, *x.shape[1:]).index_copy_(0, plan.places, x)
        if is_joined:
            return whole.movedim(0, output.batch)
        return whole.unflatten(0, (batch, width)).movedim((0, 1), (output.batch, output.token))

    # -- what a caller may set and see --------------------------------------------------------------------------------

    @property
    def signature(self):
        """The signature of the model's calls; its shapes are not to be used."""
        return self._batched.signature

    @property
    def padding(self) -> str:
        """The input that tells real tokens from padding, "" if the model has none."""
        return self._batched.padding

    @property
    def longest(self) -> int:
        """The largest length of a sequence."""
        return self._batched.longest

    @property
    def packed_outputs(self) -> bool:
        """Whether outputs for tokens come back as (tokens, …)."""
        return self._packed_outputs

    @packed_outputs.setter
    def packed_outputs(self, is_on: bool) -> None:
        self._packed_outputs = bool(is_on)

    @property
    def most_engines(self) -> int:
        """How many lengths of rows are kept."""
        return self._rows.engines.most_entries

    @most_engines.setter
    def most_engines(self, number: int) -> None:
        self._rows.engines.limit(_checked("most_engines", number))

    @property
    def most_layouts(self) -> int:
        """How many sets of sequences' lengths are kept."""
        return self._rows.plans.most_entries

    @most_layouts.setter
    def most_layouts(self, number: int) -> None:
        self._rows.plans.limit(_checked("most_layouts", number))

    def prepare_for(self, lengths: Sequence[int]) -> Engine:
        """Compile now what a batch with these lengths needs; returns the engine of their row, for these lengths only.

        Raises InputError for lengths out of range, and what `build` raises.
        """
        return self._rows.engine(layout_of_lengths(lengths, len(lengths), self.longest))

    def row_for(self, lengths: Sequence[int]) -> RowEngine:
        """The engine that calls with such lengths use, what it was compiled from, and the lists that the GPU writes.

        Parameters
        ----------
        lengths : sequence of int
            Of the batch's sequences.

        Raises
        ------
        StofError
            InputError for lengths out of range, and what `build` raises.
        """
        return self._rows.compiled(layout_of_lengths(lengths, len(lengths), self.longest))

    def report(self) -> Report:
        """The report of the engine that was used last, with the verification of the build."""
        engines = self._rows.engines
        with engines.lock:
            count, last = len(engines.entries), next(reversed(engines.entries.values()))
        report = last.engine.report()
        own = [
            f"{path or '(the model)'} masks each sequence by {mask}"
            for path, mask in last.packed.masks.items()
            if mask is not None
        ]
        rows = f"without padding: a row of {last.row} tokens, one of {count} lengths that are compiled"
        found = self._verification or report.verification
        return dataclasses.replace(report, notes=(*report.notes, rows, *own), verification=found)

    def set_verification(self, verification: Verification) -> None:
        """Set the `verification` in the report.  Raises nothing."""
        self._verification = verification

    def __repr__(self) -> str:
        return f"PackedEngine({', '.join(self._values)}; sequences of 1 to {self.longest} tokens; on {self.device})"

    # -- what only the engine of a row has ----------------------------------------------------------------------------

    @property
    def reuse_outputs(self):
        """Refused: InputError."""
        raise self._is_of_a_row("reuse_outputs")

    @reuse_outputs.setter
    def reuse_outputs(self, _is_on) -> None:
        raise self._is_of_a_row("reuse_outputs")

    @property
    def inputs_in_place(self):
        """Refused: InputError."""
        raise self._is_of_a_row("inputs_in_place")

    @inputs_in_place.setter
    def inputs_in_place(self, _numbers) -> None:
        raise self._is_of_a_row("inputs_in_place")

    @property
    def state(self):
        """Refused: InputError."""
        raise self._is_of_a_row("state")

    def prepare(self):
        """Refused, because each row has its own program: InputError."""
        raise self._is_of_a_row("prepare()")

    def reset_state(self) -> None:
        """Refused: InputError."""
        raise self._is_of_a_row("reset_state()")

    def share_state(self, other: Engine) -> None:
        """Refused, as `other` has another program: InputError."""
        raise self._is_of_a_row("share_state(other)")

    def with_mask(self, mask) -> Engine:
        """Refused, because `mask` would be of positions in a row: InputError."""
        raise self._is_of_a_row("with_mask(mask)")

    def found_blocks(self) -> dict:
        """Refused, because each row finds its own: InputError."""
        raise self._is_of_a_row("found_blocks()")

    def cuda_source(self) -> str:
        """Refused, because each row has its own program: InputError."""
        raise self._is_of_a_row("cuda_source()")

    def add_to_state(self, name: str, number: float) -> None:
        """Refused: InputError; no row has `name` to add `number` to."""
        raise self._is_of_a_row("add_to_state(name, number)")

    def save(self, path) -> None:
        """Refused, because a file at `path` would hold the engine of one row: InputError."""
        raise self._is_of_a_row("save(path)")

    def _is_of_a_row(self, name: str) -> InputError:
        return InputError(
            f"a PackedEngine has no {name}, only the engine of a row has: engine.prepare_for(lengths).{name}"
        )


def _checked(name: str, number: int) -> int:
    if type(number) is not int or number < 1:
        raise InputError(f"{name} must be a whole number from 1 on, got {number!r}")
    return number
