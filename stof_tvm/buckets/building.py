"""`bucket_engine`: exports a model for a range of shapes, and builds the engines of its buckets."""

import contextlib
import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree
from tqdm import tqdm

from stof_tvm.buckets.bucket import Bucket
from stof_tvm.buckets.engine import BucketEngine
from stof_tvm.buckets.exports import Export, export_of_program, exports_of_module, resized
from stof_tvm.buckets.sizes import combinations, given_sizes
from stof_tvm.buckets.weights import SharedWeights
from stof_tvm.buckets.workers import built
from stof_tvm.engine import Engine
from stof_tvm.frontend.padding.dims import at
from stof_tvm.frontend.padding.program import PaddedProgram, pad
from stof_tvm.frontend.shape_range import ShapeRange
from stof_tvm.frontend.specialise import specialised
from stof_tvm.range_engine import shapes_and_example, without_modes
from stof_tvm.verification.padding import check_largest, check_padding
from tir_kernels.errors import DeviceError, InputError, MaskError, NotRewrittenError

LOGGER = logging.getLogger("stof_tvm")


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    """A bucket to build: the symbols of its program that are 1, and the number of each other symbol."""

    ones: frozenset
    sizes: Mapping[Any, int]


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
        jobs = [_Job(ones, combination) for ones in exports for combination in combinations(sizes[ones])]
        for job in jobs:
            _check_taken(exports[job.ones], job.sizes)
        checked = _checked(engine, exports[frozenset()], values) if verify and values is not None else {}
        weights = SharedWeights()
        exports = {ones: dataclasses.replace(x, program=weights.private(x.program)) for ones, x in exports.items()}
        on_cpu = {ones: weights.on_cpu(x.program) for ones, x in exports.items()}

        def inputs_of(job: _Job) -> list | None:
            return checked.get((job.ones, tuple(job.sizes.values())))

        def empty(job: _Job, padded: PaddedProgram) -> Bucket:
            return Bucket(padded, exports[job.ones].shapes, job.sizes)

        def build(job: _Job) -> Bucket:
            export = exports[job.ones]
            if inputs_of(job) is None:  # it is not run
                export = dataclasses.replace(export, program=on_cpu[job.ones])
            least = {symbol: export.shapes.limits.get(symbol, (1, None))[0] for symbol in export.shapes.symbols}
            bucket = empty(job, pad(export.program, job.sizes, least, has_masks))
            if job is jobs[0] and verify and values is not None:
                _check_largest(model, shapes, {x: most for x, (_, most) in limits.items()}, values)
            try:
                bucket.engine = _built(model, export, bucket, inputs_of(job), weights, build_one)
            except (MaskError, NotRewrittenError) as error:
                if job is jobs[0]:
                    raise
                told = shapes.text_of(bucket.shapes)
                raise type(error)(
                    f"{error}; so it is for inputs of {told}, one of the sizes that the range is compiled at: a larger "
                    "least size or other buckets= may do, lazy=True compiles each shape"
                ) from error
            return bucket

        here = [job for job in jobs if job is jobs[0] or inputs_of(job) is not None]
        others = [job for job in jobs if job not in here]
        bar = tqdm(total=len(jobs), desc="build", file=sys.stderr) if progress else None
        with contextlib.nullcontext() if bar is None else bar:
            LOGGER.info("a BucketEngine of %s compiles %d sizes", shapes, len(jobs))
            ready = built(here, others, build, empty, weights, target)
            for number, (job, bucket) in enumerate(ready, 1):
                engine.add(job.ones, bucket)
                LOGGER.info("bucket %d of %d is compiled: %s", number, len(jobs), shapes.text_of(bucket.shapes))
                if bar is not None:
                    bar.update()
    engine.release_programs()
    with contextlib.suppress(DeviceError):  # it is for another machine
        engine.load()
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


def _check_largest(model, shapes: ShapeRange, sizes: Mapping, values: list) -> None:
    """InputError where PyTorch computes the example's inputs, and not these, resized to the largest of a range."""
    inputs = [resized(x, shape, sizes) for x, shape in zip(values, shapes.shapes, strict=True)]
    try:
        shapes.numbers(inputs)
    except InputError:  # a program may take multiples only
        return
    told = shapes.text_of([x.shape for x in inputs])
    nest = shapes.signature.nest_inputs
    check_largest(model, nest(values), nest(inputs), told)


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
    """What each symbol is called: the first dimension that it is, and by its Dims."""
    names = {symbol: [shapes.place(symbol)] for symbol in shapes.symbols}
    dims = {x.__name__ for x in pytree.tree_leaves(dynamic_shapes) if isinstance(x, Dim)}
    if len(names) == 1 and len(dims) == 1:  # of a symbol that is no dimension, too
        next(iter(names.values())).extend(dims)
        return names
    for spec, shape in zip(_specs(shapes, dynamic_shapes), shapes.shapes, strict=False):
        for axis, dim in spec.items() if isinstance(spec, Mapping) else enumerate(spec or ()):
            own = names.get(shape[axis])  # none of a derived Dim, whose size is an expression
            if own is not None and isinstance(dim, Dim) and dim.__name__ not in own:
                own.append(dim.__name__)
    return names


def _specs(shapes: ShapeRange, dynamic_shapes) -> list:
    """What `dynamic_shapes` has for each input tensor; None where it has nothing for one."""
    signature = shapes.signature
    args, kwargs = signature.in_spec.unflatten(range(signature.in_spec.num_leaves))
    inputs = dict(zip(signature.names, [*args, *kwargs.values()]))
    if not isinstance(dynamic_shapes, Mapping):
        # torch.export takes them in the order of forward's parameters, which calls by keyword need not have.
        order = [name for name in signature.positional if name in inputs]
        order += [name for name in inputs if name not in order]
        given = list(dynamic_shapes or ())
        rest = [inputs[name] for name in order[len(given) - 1 :]] if given else []
        if rest and isinstance(rest[0], int) and _is_nest(given[-1], len(rest)):  # those of *args
            given[-1:] = given[-1]
        dynamic_shapes = dict(zip(order, given))
    for name, spec in list(dynamic_shapes.items()):
        if name not in inputs and isinstance(spec, Sequence):
            dynamic_shapes = {**dynamic_shapes, **{f"{name}_{number}": x for number, x in enumerate(spec)}}
    found: dict[int, Any] = {}
    _place(inputs, dynamic_shapes, found)
    of_tensors = {x.tensor: found.get(number) for number, x in enumerate(signature.in_leaves) if x.tensor is not None}
    return [of_tensors[number] for number in range(len(signature.inputs))]


def _is_nest(spec, count: int) -> bool:
    """Whether this is a specification for each of so many tensors, and not one of a tensor's dimensions."""
    is_whole = lambda x: x is None or isinstance(x, Mapping | Sequence)
    return isinstance(spec, Sequence) and len(spec) == count and all(map(is_whole, spec))


def _place(inputs, spec, found: dict[int, Any]) -> None:
    """Add to `found` what a specification has for each leaf, by its number; `inputs` has these numbers in its place."""
    if isinstance(inputs, int):
        found[inputs] = spec
    elif isinstance(inputs, Mapping) and isinstance(spec, Mapping):
        for key in inputs.keys() & spec.keys():
            _place(inputs[key], spec[key], found)
    elif isinstance(spec, Mapping | Sequence):  # None is for all of them
        own = pytree.tree_leaves(inputs, is_leaf=lambda x: x is not inputs)
        for x, of_x in zip(own, spec.values() if isinstance(spec, Mapping) else spec):
            _place(x, of_x, found)


def _sizes(export: Export, shapes: ShapeRange, chosen: Mapping) -> dict[Any, tuple[int, ...]]:
    """The sizes of an export's symbols: those of the range's symbol in the same place, within its own limits."""
    found: dict[Any, tuple[int, ...]] = {}
    for own, wanted in zip(export.shapes.shapes, shapes.shapes, strict=True):
        for size, of_range in sorted(zip(own, wanted), key=lambda pair: getattr(pair[0], "is_Symbol", False)):
            for symbol in () if isinstance(size, int) else size.free_symbols:
                least, most = export.shapes.limits.get(symbol, (1, None))
                (other,) = of_range.free_symbols
                most = min(chosen[other][-1], chosen[other][-1] if most is None else most)
                found[symbol] = tuple(sorted({n for n in chosen[other] if least <= n < most} | {most}))
    return {symbol: found[symbol] for symbol in export.shapes.symbols}


def _checked(engine: BucketEngine, export: Export, values: list) -> dict:
    """The inputs on which buckets are verified, by (symbols that are 1, sizes).

    They are the example's own, and for the largest bucket some of sizes that are one less, unless the example's are.
    """
    ones, numbers, sizes = engine.placed(values)
    found = {(ones, sizes): values}
    largest = {symbol: own[-1] for symbol, own in engine._sizes[frozenset()].items()}
    place = frozenset(), tuple(largest.values())
    if place in found and numbers != largest:
        return found  # the example's own are less
    for cut in (1, 0):
        less = {symbol: max(n - cut, export.shapes.limits.get(symbol, (1, None))[0]) for symbol, n in largest.items()}
        inputs = [resized(x, shape, less) for x, shape in zip(export.example or values, export.shapes.shapes)]
        with contextlib.suppress(InputError):  # a program may take multiples only
            export.numbers(inputs)
            return {**found, place: inputs}
    return found
