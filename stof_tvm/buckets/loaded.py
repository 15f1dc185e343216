"""Engines for ranges of shapes from files, and what these say: the inverse of saved.py."""

import json
from collections.abc import Mapping

import torch
import tvm

from stof_tvm.buckets.bucket import Bucket
from stof_tvm.buckets.engine import BucketEngine
from stof_tvm.buckets.exports import Export
from stof_tvm.engine import Engine
from stof_tvm.frontend.padding.dims import Number
from stof_tvm.frontend.padding.program import PaddedProgram
from stof_tvm.frontend.shape_range import ShapeRange
from stof_tvm.report import RangeReport
from stof_tvm.running.shared_tensors import beginning
from stof_tvm.saving.artifact import Artifact
from stof_tvm.saving.expressions import load_expression as load
from stof_tvm.saving.range_file import SavedRange, load_range_file, read_range_reports
from stof_tvm.saving.weights_file import Weights
from stof_tvm.signature import Signature
from tir_kernels.errors import ArtifactError

MALFORMED = (ArtifactError, KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError)
KINDS = {kind.__name__: kind for kind in (int, float, bool)}


def load_range(path) -> BucketEngine:
    """The engine for a range that was saved as `path`.  Raises ArtifactError as `stof_tvm.load` does."""
    saved = load_range_file(path)
    try:
        engine = _loaded(saved)
    except MALFORMED as error:
        raise _malformed(path, error) from error
    engine.load()
    return engine


def read_range_report(path) -> tuple[dict, RangeReport]:
    """(manifest, report) of a saved range built for any machine: none of its code is loaded.  Raises ArtifactError."""
    manifest, described, reports = read_range_reports(path)
    try:
        shapes = _load_shapes(described["shapes"])
        pairs = zip(described["buckets"], reports, strict=True)
        kept = {shapes.text_of(x["shapes"]): own for x, own in sorted(pairs, key=lambda pair: pair[0]["shapes"])}
        return manifest, RangeReport(str(described["target"]), str(shapes), len(kept), kept, True)
    except MALFORMED as error:
        raise _malformed(path, error) from error


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


def _malformed(path, error: Exception) -> ArtifactError:
    why = error if isinstance(error, ArtifactError) else f"{type(error).__name__}: {error}"
    return ArtifactError(f"{path} is not a whole saved range: {why}")


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


def _load_shapes(described: Mapping) -> ShapeRange:
    signature = Signature.from_json(described["signature"])
    shapes = tuple(tuple(map(load, shape)) for shape in described["shapes"])
    limits = {
        load(size): (int(least), None if most is None else int(most)) for size, least, most in described["limits"]
    }
    return ShapeRange(signature, shapes, limits)


def _load_output(made: list):
    kind, *rest = made
    if kind == "tensor":
        return tuple(tuple(map(load, dim)) for dim in rest)
    if kind == "number":
        name, expression = rest
        return Number(load(expression), KINDS[name])
    (constant,) = rest
    return constant
