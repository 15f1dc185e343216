"""`build(…, dynamic_shapes=…)`: engines at a few sizes, built at once, for all shapes of a range."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stof_tvm.buckets.bucket import Bucket, Plan
from stof_tvm.buckets.exports import Export
from stof_tvm.buckets.saved import save_range
from stof_tvm.buckets.sizes import smallest_fit
from stof_tvm.engine import Engine
from stof_tvm.frontend.shape_range import ShapeRange
from stof_tvm.range_engine import RangeEngine, Shapes
from stof_tvm.report import RangeReport
from stof_tvm.running.bounded_cache import BoundedCache
from stof_tvm.running.workspace import Workspace
from tir_kernels.errors import InputError

MOST_PLANS = 4096


class BucketEngine(RangeEngine):
    """A model for a range of shapes, compiled at a few sizes.  `build` returns one with `dynamic_shapes`.

    A call of any shape in the range runs the engine of the next larger sizes, its buckets: inputs are padded, and what
    is padding is cut off the results.  No result depends on padding: where that could not be proved, `build` raised.
    Nothing compiles after the build.  Threads may share it; its calls run one after another.

    Attributes
    ----------
    reuse_outputs : bool
        True on a GPU lets outputs hold only until the next call of any shape.
    """

    def __init__(self, shapes: ShapeRange, target, exports: Mapping[frozenset, Export], sizes: Mapping):
        # It builds no engine later.
        super().__init__(shapes, None, None, target, None)  # type: ignore[arg-type]
        self._exports = exports
        self._buckets: dict[frozenset, dict[tuple[int, ...], Bucket]] = {}
        self._sizes = sizes
        self._common = Workspace()
        self._crc32: int | None = None  # of the weights in the file that it was loaded from
        self._plans: BoundedCache[Plan] = BoundedCache(lambda plan: 0, 0, MOST_PLANS)

    def run(self, values: list):
        """A call whose inputs are already in a list.  Returns and raises what a call does.

        Parameters
        ----------
        values : list
            A tensor for each input, in order, of a shape in the range and the model's dtype; else InputError.
        """
        plan = self._plan(values)
        return plan.bucket.run(plan, values, self._reuse_outputs)

    def _plan(self, values: list) -> Plan:
        kinds = tuple((tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)) for x in values)
        is_plain = all(isinstance(x, torch.Tensor) and x.layout is torch.strided for x in values)
        plan = self._plans.get(kinds) if is_plain else None
        if plan is None:
            ones, numbers, sizes = self.placed(values)
            plan = self._plans.put(kinds, self._buckets[ones][sizes].plan(numbers, self.device))
        return plan

    def placed(self, values: list) -> tuple[frozenset, dict[Any, int], tuple[int, ...]]:
        """(the symbols that are 1, the numbers of the program's symbols, its bucket's sizes) for a call's inputs.

        InputError where they are outside the range.
        """
        numbers = self._shapes.numbers(values)
        ones = frozenset(x for key in self._exports for x in key if numbers[x] == 1)
        own = self._exports[ones].numbers(values)
        return ones, own, tuple(smallest_fit(self._sizes[ones][symbol], own[symbol]) for symbol in self._sizes[ones])

    def engine_for(self, *args, **kwargs) -> Engine:
        """Refused, because an engine of a bucket takes padded inputs: InputError."""
        raise self._is_padded("engine_for")

    def prepare(self, *args, **kwargs) -> Callable:
        """Load the program for the call `model(*args, **kwargs)` now instead of at the first one.

        Raises what a call raises, as InputError.
        """
        return self._plan(self._shapes.signature.arguments(args, kwargs)).bucket.engine.prepare()

    def report(self) -> RangeReport:  # type: ignore[override]  # a report of reports
        """The range, and the report of each bucket's engine, the largest last."""
        return RangeReport(self._target, str(self._shapes), len(self._kept()), self._reports(), True)

    def _reports(self) -> dict[str, Any]:
        return {self._shapes.text_of(shapes): engine.report() for shapes, engine in self._kept().items()}

    def _kept(self) -> dict[Shapes, Engine]:
        found = {bucket.shapes: bucket.engine for own in self._buckets.values() for bucket in own.values()}
        return dict(sorted(found.items(), key=lambda entry: entry[0]))  # not in the order in which they were built

    @property
    def most_engines(self) -> int:
        """How many engines there are."""
        return len(self._kept())

    @most_engines.setter
    def most_engines(self, number: int) -> None:
        raise InputError("the engines of all buckets are kept: choose fewer by buckets= of build")

    def save(self, path) -> None:
        """Write the engine to one file, `path`: all buckets, and their weights once.  `stof_tvm.load` reads it back.

        Raises ArtifactError where the file cannot be written, CompileError where nvcc refuses the kernels.
        """
        save_range(path, self._target, self._shapes, self._exports, self._sizes, self._buckets, self._crc32)

    def _is_padded(self, name: str) -> InputError:
        return InputError(f"{name} is of engines with lazy=True: those of buckets take padded inputs")

    def _is_of_one_shape(self, name: str) -> InputError:
        return InputError(f"an engine for a range of shapes has no {name}: with lazy=True the engine of each shape has")

    def release_programs(self) -> None:
        """Let go of the exported programs, and with them of the model's weights; calls need neither."""
        self._exports = {ones: export.released() for ones, export in self._exports.items()}
        for own in self._buckets.values():
            for bucket in own.values():
                bucket.padded = dataclasses.replace(bucket.padded, program=None)

    def load(self) -> None:
        """Load the code of all buckets: else the first call of each would wait.  DeviceError without the device.

        On a GPU their graphs are captured, too.
        """
        for own in self._buckets.values():
            for bucket in own.values():
                assert bucket.engine is not None
                bucket.engine.prepare()
                if self._device_type == "cuda":
                    bucket.warm_up(self.device)

    def add(self, ones: frozenset, bucket: Bucket) -> None:
        """Have a bucket, with its engine, of the program in which the symbols `ones` are 1."""
        bucket.engine._join(self._store)
        bucket.engine._share_workspace(self._common)
        self._buckets.setdefault(ones, {})[tuple(bucket.sizes.values())] = bucket
