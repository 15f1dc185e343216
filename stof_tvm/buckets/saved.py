"""Files of engines for ranges of shapes: what a BucketEngine is beside its buckets' code, as JSON and back."""

import json
from collections.abc import Mapping

import torch
import tvm

from stof_tvm.buckets.bucket import Bucket
from stof_tvm.buckets.engine import BucketEngine
from stof_tvm.buckets.exports import Export
from stof_tvm.buckets.guards import guard_expressions
from stof_tvm.engine import Engine
from stof_tvm.frontend.padding.dims import Number
from stof_tvm.frontend.padding.program import PaddedProgram
from stof_tvm.frontend.shape_range import ShapeRange
from stof_tvm.running.shared_tensors import beginning, whole_of
from stof_tvm.saving.artifact import Artifact
from stof_tvm.saving.expressions import dump_expression as dump
from stof_tvm.saving.expressions import load_expression as load
from stof_tvm.saving.range_file import SavedRange, load_range_file, save_range_file
from stof_tvm.saving.weights_file import Weights
from stof_tvm.signature import Signature
from tir_kernels.errors import ArtifactError

KINDS = {kind.__name__: kind for kind in (int, float, bool)}


def save_range(engine: BucketEngine, path) -> None:
    """Write the file of an engine for a range.  Raises what `BucketEngine.save` does."""
    buckets = [(ones, bucket) for ones, own in engine._buckets.items() for bucket in own.values()]
    tensors = [x for _, bucket in buckets for x in map(whole_of, bucket.engine._weights.tensors)]
    wholes = {id(x): x for x in tensors}
    numbers = {key: number for number, key in enumerate(wholes)}

    def described(ones: frozenset, bucket: Bucket) -> dict:
        padded = bucket.padded
        return {
            "ones": sorted(map(str, ones)),
            "sizes": [[dump(symbol), size] for symbol, size in bucket.sizes.items()],
            "integers": [*map(dump, padded.integers)],
            "reals": [*map(dump, padded.reals)],
            "outputs": [*map(_dump_output, padded.outputs)],
            "weights": [[numbers[id(whole_of(x))], list(x.shape)] for x in bucket.engine._weights.tensors],
        }

    def description() -> dict:
        return {
            "target": engine._target,
            "shapes": _dump_shapes(engine._shapes),
            "exports": [
                {
                    "ones": sorted(map(str, ones)),
                    "shapes": _dump_shapes(export.shapes),
                    "assertions": [
                        [dump(holds), told] for holds, told in (*export.assertions, *guard_expressions(export.shapes))
                    ],
                    "sizes": [[dump(symbol), list(sizes)] for symbol, sizes in engine._sizes[ones].items()],
                }
                for ones, export in engine._exports.items()
            ],
            "buckets": [described(*entry) for entry in buckets],
        }

    saved = [lambda place, bucket=bucket: bucket.engine._write(place, Weights()) for _, bucket in buckets]
    save_range_file(path, description, Weights([*wholes.values()], engine._crc32), saved)


def load_range(path) -> BucketEngine:
    """The engine for a range that was saved as `path`.  Raises ArtifactError as `stof_tvm.load` does."""
    saved = load_range_file(path)
    try:
        engine = _loaded(saved)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ArtifactError(f"{saved.path} is not a whole saved range: {type(error).__name__}: {error}") from error
    engine.load()
    return engine


def _loaded(saved: SavedRange) -> BucketEngine:
    described = saved.description
    of_range = _load_shapes(described["shapes"])
    symbols = {str(symbol): symbol for symbol in of_range.symbols}
    exports, sizes, ones_of = {}, {}, {}
    for entry in described["exports"]:
        shapes = _load_shapes(entry["shapes"])
        own = {load(symbol): tuple(map(int, found)) for symbol, found in entry["sizes"]}
        ones_of[tuple(entry["ones"])] = ones = frozenset(symbols[name] for name in entry["ones"])
        assertions = tuple((load(holds), str(told)) for holds, told in entry["assertions"])
        exports[ones], sizes[ones] = Export(None, shapes, assertions, []), own
    target = tvm.target.Target(json.loads(described["target"]))
    engine = BucketEngine(of_range, target, exports, sizes)
    engine._crc32 = saved.weights.crc32
    for number, (entry, artifact) in enumerate(zip(described["buckets"], saved.buckets, strict=True)):
        ones = ones_of[tuple(entry["ones"])]
        padded = PaddedProgram(
            None,
            tuple(map(load, entry["integers"])),
            tuple(map(load, entry["reals"])),
            tuple(map(_load_output, entry["outputs"])),
        )
        bucket = Bucket(padded, exports[ones].shapes, {load(symbol): int(size) for symbol, size in entry["sizes"]})
        bucket.engine = _engine(saved, number, artifact, _weights(entry["weights"], saved.weights.tensors))
        engine.add(ones, bucket)
    return engine


def _engine(saved: SavedRange, number: int, artifact: Artifact, weights: list[torch.Tensor]) -> Engine:
    return Engine(
        artifact.library,
        lambda path: saved.export_library(number, path),
        artifact.signature,
        artifact.report,
        artifact.manifest["masks"],
        artifact.manifest["memory"],
        Weights(weights),
        lambda: artifact.kernels,
    )


def _weights(described: list, tensors) -> list[torch.Tensor]:
    """A bucket's weights, each one of the file's tensors or its beginning."""
    found = []
    for number, shape in described:
        whole = tensors[number]
        if torch.Size(shape).numel() > whole.numel():
            raise ValueError(f"a weight of shape {shape} in a tensor of {tuple(whole.shape)}")
        found.append(whole if list(whole.shape) == shape else beginning(whole, shape))
    return found


def _dump_shapes(shapes: ShapeRange) -> dict:
    return {
        "signature": shapes.signature.to_json(),
        "shapes": [[*map(dump, shape)] for shape in shapes.shapes],
        "limits": [[dump(size), *limits] for size, limits in shapes.limits.items()],
    }


def _load_shapes(described: Mapping) -> ShapeRange:
    signature = Signature.from_json(described["signature"])
    shapes = tuple(tuple(map(load, shape)) for shape in described["shapes"])
    limits = {load(size): (least, most) for size, least, most in described["limits"]}
    return ShapeRange(signature, shapes, limits)


def _dump_output(known) -> list:
    """What is known of a result (PaddedProgram.outputs)."""
    if isinstance(known, tuple):
        return ["tensor", *([*map(dump, dim)] for dim in known)]
    if isinstance(known, Number):
        return ["number", known.kind.__name__, dump(known.expression)]
    return ["constant", known]


def _load_output(made: list):
    kind, *rest = made
    if kind == "tensor":
        return tuple(tuple(map(load, dim)) for dim in rest)
    if kind == "number":
        name, expression = rest
        return Number(load(expression), KINDS[name])
    (constant,) = rest
    return constant
