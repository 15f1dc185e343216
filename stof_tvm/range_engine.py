"""An engine for a range of shapes: a compiled program for each shape, made at the shape's first call."""

import contextlib
import logging
import types
from collections.abc import Callable, Mapping

import torch

from stof_tvm.dynamo.autocast import refuse_autocast
from stof_tvm.engine import Engine
from stof_tvm.frontend.export import example_inputs
from stof_tvm.frontend.import_model import refuse_arrays, refuse_meta
from stof_tvm.frontend.shape_range import ShapeRange, range_of_module, range_of_program
from stof_tvm.frontend.snapshot import Snapshot
from stof_tvm.frontend.specialise import specialised
from stof_tvm.report import RangeReport
from stof_tvm.running.bounded_cache import BoundedCache
from stof_tvm.running.gpus import current_device
from stof_tvm.running.states import Store
from stof_tvm.verification.verify import PASSED, PYTORCH_FAILS
from tir_kernels.compiling.one_at_a_time import one_at_a_time
from tir_kernels.errors import ExportError, InputError, MaskError, NotRewrittenError

MOST_ENGINES = 64
LOGGER = logging.getLogger("stof_tvm")

Shapes = tuple[tuple[int, ...], ...]  # of each input tensor


class RangeEngine(Engine):
    """A model for a range of shapes, each compiled by itself.  `build` returns one with `lazy=True`.

    It is called as an Engine is, with inputs of any shapes in the range.  The first call of new shapes compiles an
    Engine for them, which takes seconds; it computes what an engine does that `build` makes for these shapes.  Threads
    may share a RangeEngine: while one compiles, calls of other, compiled shapes go on; threads that need the same new
    shapes wait for one compilation.

    Engines share weights of equal content, on a GPU as well.  The memory of their results is each engine's own.

    Attributes
    ----------
    most_engines : int
        How many engines are kept, 64 at first; the least recently used one is dropped.
    reuse_outputs : bool
        That of each Engine: True on a GPU lets outputs hold only until the next call of the same shapes.
    """

    def __init__(self, shapes: ShapeRange, snapshot: Snapshot, build_one: Callable, target, example: list | None):
        self._shapes = shapes
        self._snapshot = snapshot
        self._build_one = build_one  # from (model, (args, kwargs), snapshot) to an Engine
        self._target = str(target)
        self._device_type = target.kind.name.replace("llvm", "cpu")
        self._index, self._peers = current_device(self._device_type).index or 0, None
        self._devices = None if example is None else [value.device for value in example]  # where the model computes
        self._engines: BoundedCache[tuple[Shapes, Engine]] = BoundedCache(lambda entry: 0, 0, MOST_ENGINES)
        self._reuse_outputs = False
        # What holds for one set of shapes: else what fails at others is not their fault.
        self._is_built = self._is_verified = False
        self._store = Store()  # the buffers that calls update, of all shapes

    def __call__(self, *args, **kwargs):
        """Run the model on inputs of shapes in the range, compiling an engine for these if there is none.

        `args` and `kwargs` are those of the PyTorch model, with tensors of the dtypes and nesting of the example and of
        shapes in the range.  Returns what the model returned.

        Raises what an Engine and `build` raise; InputError for shapes outside the range, or that the model refuses.
        """
        return self.run(self._shapes.signature.arguments(args, kwargs))

    def run(self, values: list):
        """A call whose inputs are already in a list.  Returns and raises what a call does.

        Parameters
        ----------
        values : list
            A tensor for each input, in order, of a shape in the range and the model's dtype; else InputError.
        """
        return self._engine(values).run(values)

    def engine_for(self, *args, **kwargs) -> Engine:
        """The Engine for the shapes of the call `model(*args, **kwargs)`, which can be saved; built if there is none.

        Raises what a call raises, as InputError, except for inputs on another device.
        """
        return self._engine(self._shapes.signature.arguments(args, kwargs))

    def prepare(self, *args, **kwargs) -> Callable:
        """Load the program for the call `model(*args, **kwargs)` now, built if there is none.

        Raises what a call raises, as InputError.
        """
        return self.engine_for(*args, **kwargs).prepare()

    def report(self) -> RangeReport:  # type: ignore[override]  # a report of reports
        """The ranges, and the reports of the engines that are kept."""
        engines = {self._shapes.text_of(shapes): engine.report() for shapes, engine in self._kept().items()}
        return RangeReport(self._target, str(self._shapes), self.most_engines, engines)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shapes}; on {self.device}, {len(self._kept())} engines)"

    @property
    def copied_model(self) -> torch.nn.Module | torch.export.ExportedProgram:
        """The copy of the model that engines are built from."""
        return self._snapshot.model

    @property
    def most_engines(self) -> int:
        """How many engines are kept."""
        return self._engines.most_entries

    @most_engines.setter
    def most_engines(self, number: int) -> None:
        if type(number) is not int or number < 1:
            raise InputError(f"most_engines must be a whole number from 1 on, got {number!r}")
        self._engines.limit(number)

    @property
    def reuse_outputs(self) -> bool:
        """Whether outputs hold only until the next call of the same shapes."""
        return self._reuse_outputs

    @reuse_outputs.setter
    def reuse_outputs(self, is_on: bool) -> None:
        self._reuse_outputs = is_on
        for engine in self._kept().values():
            engine.reuse_outputs = is_on

    @property
    def inputs_in_place(self):
        """Refused: InputError."""
        raise self._is_of_one_shape("inputs_in_place")

    @inputs_in_place.setter
    def inputs_in_place(self, _numbers) -> None:
        raise self._is_of_one_shape("inputs_in_place")

    @property
    def signature(self):
        """Refused, because each Engine has its own: InputError."""
        raise self._is_of_one_shape("signature")

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of a call's arguments, in the model's order."""
        return tuple(self._shapes.signature.names)

    def cuda_source(self) -> str:
        """Refused, because each Engine has its own: InputError."""
        raise self._is_of_one_shape("cuda_source()")

    def found_blocks(self) -> dict:
        """Refused, because each Engine finds its own: InputError."""
        raise self._is_of_one_shape("found_blocks()")

    def with_mask(self, mask) -> Engine:
        """Refused, because each Engine has its own mask arrays: InputError."""
        raise self._is_of_one_shape("with_mask(mask)")

    def save(self, path) -> None:
        """Refused, because a file at `path` would hold one Engine: InputError."""
        raise self._is_of_one_shape("save(path)")

    def _is_of_one_shape(self, name: str) -> InputError:
        return InputError(
            f"a RangeEngine has no {name}, only the engine of each shape has: engine.engine_for(*inputs).{name}"
        )

    def _kept(self) -> dict[Shapes, Engine]:
        with self._engines.lock:
            return dict(self._engines.entries.values())

    def _engine(self, values: list) -> Engine:
        shapes = _shapes(values)
        if (known := self._engines.get(shapes)) is not None:
            return known[1]
        return self._built(shapes, values, self._shapes.numbers(values))

    @one_at_a_time
    def _built(self, shapes: Shapes, values: list, numbers: Mapping) -> Engine:
        """The engine of new shapes; another thread may have built it meanwhile."""
        if (known := self._engines.get(shapes)) is not None:
            return known[1]
        there = values if self._devices is None else [x.to(device) for x, device in zip(values, self._devices)]
        model = self._snapshot.model
        if isinstance(model, torch.export.ExportedProgram):
            model = specialised(model, numbers)
        LOGGER.info(
            "a RangeEngine compiles the engine of inputs of %s, at their first call", self._shapes.text_of(shapes)
        )
        try:
            with without_modes(), self._on_its_gpu():
                engine = self._build_one(model, self._shapes.signature.nest_inputs(there), self._snapshot)
        except (ExportError, MaskError, NotRewrittenError) as error:
            if not self._is_built:
                raise
            raise self._explained(error, shapes) from error
        names, expected = ([spec.name for spec in x.inputs] for x in (engine.signature, self._shapes.signature))
        if names != expected:  # `run` passes inputs by their places
            raise ExportError(f"the model was exported with the inputs {names}, and its range with {expected}")
        self._is_built = True
        self._check_verified(engine, shapes)
        self._share_states(engine)
        engine.reuse_outputs = self._reuse_outputs
        return self._engines.put(shapes, (shapes, engine))[1]

    def _check_verified(self, engine: Engine, shapes: Shapes) -> None:
        """InputError where PyTorch fails, as with positions beyond a table, and did not at other shapes."""
        found = engine.report().verification
        if self._is_verified and found is not None and found.detail.startswith(PYTORCH_FAILS):
            raise InputError(f"for inputs of {self._shapes.text_of(shapes)} {found.detail}")
        self._is_verified |= found is not None and found.result == PASSED

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The model's buffers that calls update, the same for all shapes; none before the first engine is built."""
        known = [name for engine in self._kept().values() for name in engine.state]  # allocates them
        return types.MappingProxyType(self._store.buffers if known else {})

    def reset_state(self) -> None:
        """Give `state` the values that the model's buffers had when `build` copied it."""
        with self._turn() as store:
            store.reset()

    def share_state(self, other: Engine) -> None:
        """Refused, because each Engine has its own program: InputError."""
        raise self._is_of_one_shape("share_state(other)")

    def _share_states(self, engine: Engine) -> None:
        """Let all engines update the same buffers.

        Where a buffer is found to be updated, the others, which have it for a constant, are dropped: their next calls
        build them again.
        """
        buffers = {state.name for state in engine.signature.states if state.input is None}
        if not buffers <= self._snapshot.states:
            self._snapshot.states |= buffers
            self._engines.clear()
        engine._join(self._store)

    def _explained(self, error: Exception, shapes: Shapes) -> Exception:
        told = self._shapes.text_of(shapes)
        if isinstance(error, MaskError):
            fixed = "a mask of fixed size, such as a tensor, fits only the shapes that it was made for"
            return MaskError(f"for inputs of {told}: {error} ({fixed}; masks of stof_tvm.masks fit all)")
        if isinstance(error, NotRewrittenError):
            return NotRewrittenError(f"for inputs of {told}: {error}")
        return InputError(f"the model does not take inputs of {told}: {error}")


def range_engine(model, call: tuple, dynamic_shapes, target, verify: bool, build_one: Callable) -> RangeEngine:
    """The RangeEngine of a model.

    Parameters
    ----------
    model : torch.nn.Module or ExportedProgram
    call : (tuple or None, dict or None)
        The example call, as `build` was given it.
    dynamic_shapes
        As `torch.export.export` takes it; None for an ExportedProgram, which has its own.
    target : tvm.target.Target
    verify : bool
        Build the engine of the example inputs now, and compare it.
    build_one : callable
        `build_one(model, (args, kwargs), snapshot)` is the Engine for a call.

    Raises InputError for `dynamic_shapes` or example inputs that do not fit, and what `build` raises.
    """
    shapes, example = shapes_and_example(model, call, dynamic_shapes)
    values = None if example is None else shapes.signature.arguments(*example)
    with without_modes():
        snapshot = Snapshot(model)
    engine = RangeEngine(shapes, snapshot, build_one, target, values)
    if verify and example is not None:
        engine.engine_for(*example[0], **example[1])
    return engine


def shapes_and_example(model, call: tuple, dynamic_shapes) -> tuple[ShapeRange, tuple | None]:
    """(the range of a model's shapes, (args, kwargs) of the example call or None for a program without).

    Raises InputError for what is no model, and for `dynamic_shapes` or example inputs that do not fit.
    """
    if isinstance(model, torch.export.ExportedProgram):
        shapes, example = _of_program(model, call, dynamic_shapes)
    elif isinstance(model, torch.nn.Module):
        shapes, example = _of_module(model, call, dynamic_shapes)
    else:
        raise InputError(f"a model is a torch.nn.Module or a torch.export.ExportedProgram, got {type(model).__name__}")
    refuse_meta(model)
    refuse_autocast(model.parameters(), "build the engine")
    if example is not None:
        shapes.numbers(shapes.signature.arguments(*example))
    return shapes, example


def _of_program(program, call: tuple, dynamic_shapes) -> tuple[ShapeRange, tuple | None]:
    if dynamic_shapes is not None:
        raise InputError("an ExportedProgram has its own dynamic shapes: leave dynamic_shapes out")
    shapes = range_of_program(program)
    if not shapes.is_dynamic:
        raise InputError("lazy=True is for a range of shapes, and this ExportedProgram has fixed ones: leave it out")
    args, kwargs = call
    return shapes, (tuple(args or ()), dict(kwargs or {})) if args or kwargs else program.example_inputs


def _of_module(model, call: tuple, dynamic_shapes) -> tuple[ShapeRange, tuple]:
    if dynamic_shapes is None:
        raise InputError("lazy=True is for a range of shapes: give dynamic_shapes, as torch.export.export takes them")
    refuse_arrays(*call)
    args, kwargs = example_inputs(model, *call)
    shapes = range_of_module(model, args, kwargs, dynamic_shapes)
    if not shapes.is_dynamic:
        raise InputError(f"dynamic_shapes={dynamic_shapes!r} makes no dimension dynamic: give some a torch.export.Dim")
    return shapes, (args, kwargs)


@contextlib.contextmanager
def without_modes():
    """Without the inference mode and the autocast of whoever calls: what they make of a model would stay."""
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _shapes(values: list) -> Shapes:
    return tuple(tuple(getattr(value, "shape", ())) for value in values)
