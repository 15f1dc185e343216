"""`build(…, dynamic_shapes=…)`: engines at a few sizes, built at once, for all shapes of a range."""

import contextlib
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree
from tqdm import tqdm

from stof_tvm.buckets.bucket import Bucket, Plan
from stof_tvm.buckets.exports import Export, export_of_program, exports_of_module, resized
from stof_tvm.buckets.sizes import combinations, given_sizes, smallest_fit
from stof_tvm.engine import Engine
from stof_tvm.frontend.padding.dims import at
from stof_tvm.frontend.padding.program import pad
from stof_tvm.frontend.shape_range import ShapeRange
from stof_tvm.frontend.specialise import specialised
from stof_tvm.range_engine import RangeEngine, Shapes, shapes_and_example, without_modes
from stof_tvm.report import RangeReport
from stof_tvm.running.bounded_cache import BoundedCache
from stof_tvm.running.shared_tensors import SharedTensors
from stof_tvm.running.workspace import Workspace
from stof_tvm.verification.padding import check_padding
from tir_kernels.errors import InputError

MOST_PLANS = 4096


class SharedWeights:
    """What engines of a range have in common; `build` takes it for a Snapshot."""

    states: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._weights = SharedTensors()

    def check(self, tensors) -> None:
        """Nothing: the engines of a range are built at once."""

    def shared(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """An engine's weights, each replaced by another engine's tensor of equal content."""
        return self._weights.shared(weights)


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
        self._workspace = Workspace()
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
        """The range, and the report of each bucket's engine."""
        return RangeReport(self._target, str(self._shapes), len(self._kept()), self._reports(), True)

    def _reports(self) -> dict[str, Any]:
        return {self._text(shapes): engine.report() for shapes, engine in self._kept().items()}

    def _kept(self) -> dict[Shapes, Engine]:
        return {bucket.shapes: bucket.engine for own in self._buckets.values() for bucket in own.values()}

    @property
    def most_engines(self) -> int:
        """How many engines there are."""
        return len(self._kept())

    @most_engines.setter
    def most_engines(self, number: int) -> None:
        raise InputError("the engines of all buckets are kept: choose fewer by buckets= of build")

    def save(self, path) -> None:
        """Refused, because a file at `path` would hold one Engine: InputError."""
        raise InputError(
            "an engine for a range of shapes cannot be saved: build one with lazy=True, and save the engine of each "
            "shape, engine.engine_for(*inputs).save(path)"
        )

    def _is_padded(self, name: str) -> InputError:
        return InputError(f"{name} is of engines with lazy=True: those of buckets take padded inputs")

    def _is_of_one_shape(self, name: str) -> InputError:
        return InputError(f"an engine for a range of shapes has no {name}: with lazy=True the engine of each shape has")

    def _add(self, ones: frozenset, bucket: Bucket, engine: Engine) -> None:
        bucket.engine = engine
        engine._join(self._store)
        engine._share_workspace(self._workspace)
        self._buckets.setdefault(ones, {})[tuple(bucket.sizes.values())] = bucket


def bucket_engine(
    model, call: tuple, dynamic_shapes, target, build_one: Callable, buckets=None, *, has_masks, verify, progress
) -> BucketEngine:
    """The BucketEngine of a model, all its buckets built.

    Parameters
    ----------
    model : torch.nn.Module or ExportedProgram
    call : (tuple or None, dict or None)
        The example call, as `build` was given it.
    dynamic_shapes
        As `torch.export.export` takes it; None for an ExportedProgram, which has its own.
    target : tvm.target.Target
    build_one : callable
        `build_one(program, (args, kwargs), shared, plan)` is the Engine of a padded program; with a Plan it is
        verified, by what is no padding.
    buckets : sequence or dict, optional
        Sizes, as `build` takes them.
    has_masks, verify, progress : bool
        Whether masks are given, whether some buckets are verified, whether a bar is shown.

    Raises what `build` raises.
    """
    shapes, example = shapes_and_example(model, call, dynamic_shapes)
    values = None if example is None else shapes.signature.arguments(*example)
    limits = _limits(shapes)
    names = _names(shapes, dynamic_shapes)
    chosen = given_sizes(buckets, limits, names)
    with without_modes():
        if isinstance(model, torch.export.ExportedProgram):
            exports = {frozenset(): export_of_program(model, shapes, values)}
        else:
            exports = exports_of_module(model, shapes, limits, values or [], dynamic_shapes)
        sizes = {ones: _sizes(export, shapes, chosen) for ones, export in exports.items()}
        engine = BucketEngine(shapes, target, exports, sizes)
        wanted = [(ones, combination) for ones in exports for combination in combinations(sizes[ones])]
        checked = _checked(engine, exports[frozenset()], values) if verify and values is not None else {}
        shared = SharedWeights()
        bar = tqdm(wanted, desc="build", file=sys.stderr) if progress else contextlib.nullcontext(wanted)
        with bar as steps:
            for ones, combination in steps:
                export = exports[ones]
                least = {symbol: max(export.shapes.limits[symbol][0], 1) for symbol in export.shapes.symbols}
                _check_taken(export, combination)
                padded = pad(export.program, combination, least, has_masks)
                bucket = Bucket(padded, export.shapes, combination)
                inputs = checked.get((ones, tuple(combination.values())))
                engine._add(ones, bucket, _built(model, export, bucket, inputs, shared, build_one))
    return engine


def _built(model, export: Export, bucket: Bucket, values: list | None, shared: SharedWeights, build_one) -> Engine:
    """The engine of a bucket, compared with PyTorch on some inputs if there are any."""
    if values is None:
        return build_one(bucket.padded.program, (None, None), shared, None)
    numbers = export.numbers(values)
    plan = bucket.plan(numbers, torch.device("cpu"))

    def padded(fill: float) -> tuple:
        inputs = [bucket.filled(number, x, fill) for number, x in enumerate(values)]
        args, kwargs = export.shapes.signature.nest_inputs(inputs)
        return args, {**kwargs, **plan.numbers}

    check_padding(
        *(model, export.shapes.signature.nest_inputs(values)),
        *(specialised(export.program, numbers), bucket.padded.program),
        *(padded(math.nan), plan.cut),
    )
    return build_one(bucket.padded.program, padded(0), shared, plan)


def _check_taken(export: Export, sizes: Mapping) -> None:
    """InputError where a program does not take inputs of a bucket's sizes, as one of even lengths only."""
    specs = export.shapes.signature.inputs
    shapes = [[at(size, sizes) for size in shape] for shape in export.shapes.shapes]
    values = [torch.zeros((), dtype=getattr(torch, spec.dtype)).expand(shape) for spec, shape in zip(specs, shapes)]
    try:
        export.numbers(values)
    except InputError as error:
        raise InputError(f"the program has no bucket of sizes {list(sizes.values())}, give others: {error}") from None


def _limits(shapes: ShapeRange) -> dict[Any, tuple[int, int]]:
    """(least, most) of each symbol.  InputError where one has no largest number."""
    found = {}
    for symbol in shapes.symbols:
        least, most = shapes.limits.get(symbol, (1, None))
        if most is None:
            raise InputError(
                f"{shapes.place(symbol)} has no largest size: give its Dim a max, or compile each shape with lazy=True"
            )
        found[symbol] = _least(shapes, symbol, least), most
    return found


def _least(shapes: ShapeRange, symbol, least: int) -> int:
    """The least number of a symbol; torch.export takes 2 for one that is no dimension itself."""
    sizes = [size for shape in shapes.shapes for size in shape if not isinstance(size, int)]
    if symbol in sizes:
        return least
    own = [size for size in sizes if symbol in size.free_symbols and size in shapes.limits]
    while least > 1 and own and all(at(x, {symbol: least - 1}) >= shapes.limits[x][0] for x in own):
        least -= 1
    return least


def _names(shapes: ShapeRange, dynamic_shapes) -> dict[Any, list[str]]:
    """What each symbol is called: the first dimension that it is, and by its Dim where that is the only one."""
    names = {symbol: [shapes.place(symbol)] for symbol in shapes.symbols}
    dims = {x.__name__ for x in pytree.tree_leaves(dynamic_shapes) if isinstance(x, Dim)}
    if len(names) == 1 and len(dims) == 1:
        next(iter(names.values())).extend(dims)
    return names


def _sizes(export: Export, shapes: ShapeRange, chosen: Mapping) -> dict[Any, tuple[int, ...]]:
    """The sizes of an export's symbols: those of the range's symbol in the same place, within its own limits."""
    found: dict[Any, tuple[int, ...]] = {}
    for own, wanted in zip(export.shapes.shapes, shapes.shapes, strict=True):
        for size, of_range in sorted(zip(own, wanted), key=lambda pair: getattr(pair[0], "is_Symbol", False)):
            for symbol in () if isinstance(size, int) else size.free_symbols:
                least, most = export.shapes.limits[symbol]
                (other,) = of_range.free_symbols
                most = min(chosen[other][-1], chosen[other][-1] if most is None else most)
                found[symbol] = tuple(sorted({n for n in chosen[other] if least <= n < most} | {most}))
    return {symbol: found[symbol] for symbol in export.shapes.symbols}


def _checked(engine: BucketEngine, export: Export, values: list) -> dict:
    """The inputs on which buckets are verified, by (symbols that are 1, sizes).

    They are the example's own, and for the largest bucket sizes that are one less.
    """
    ones, _, sizes = engine.placed(values)
    found = {(ones, sizes): values}
    largest = {symbol: own[-1] for symbol, own in engine._sizes[frozenset()].items()}
    for cut in (1, 0):
        less = {symbol: max(n - cut, export.shapes.limits[symbol][0]) for symbol, n in largest.items()}
        inputs = [resized(x, shape, less) for x, shape in zip(export.example or values, export.shapes.shapes)]
        with contextlib.suppress(InputError):  # a program may take multiples only
            export.numbers(inputs)
            return {(frozenset(), tuple(largest.values())): inputs, **found}
    return found
