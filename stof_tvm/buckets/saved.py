"""Files of engines for ranges of shapes: what a BucketEngine is beside its buckets' code, as JSON (back: loaded.py)."""

from collections.abc import Mapping
from dataclasses import replace

from torch.utils import _pytree as pytree

from stof_tvm.buckets.bucket import Bucket
from stof_tvm.buckets.guards import guard_expressions
from stof_tvm.frontend.padding.dims import Number
from stof_tvm.frontend.shape_range import ShapeRange
from stof_tvm.running.shared_tensors import whole_of
from stof_tvm.saving.expressions import dump_expression as dump
from stof_tvm.saving.range_file import save_range_file
from stof_tvm.saving.weights_file import Weights


def save_range(
    path, target: str, shapes: ShapeRange, exports: Mapping, sizes: Mapping, buckets: Mapping, crc32: int | None
) -> None:
    """Write the file of an engine for a range.

    Parameters
    ----------
    target : str
    shapes : ShapeRange
        Of calls.
    exports, sizes, buckets : mapping
        For each set of symbols that are 1: the Export, the sizes of its symbols, and its buckets by their sizes.
    crc32 : int, optional
        That of the weights in the file that they are mapped from, if they are.

    Raises what `BucketEngine.save` does.
    """
    every = [(ones, bucket) for ones, own in buckets.items() for bucket in own.values()]
    tensors = [x for _, bucket in every for x in map(whole_of, bucket.engine._weights.tensors)]
    wholes = {id(x): x for x in tensors}
    numbers = {key: number for number, key in enumerate(wholes)}

    def described(ones: frozenset, bucket: Bucket) -> dict:
        padded = bucket.padded
        return {
            "ones": sorted(map(str, ones)),
            "shapes": bucket.shapes,
            "sizes": [[dump(symbol), size] for symbol, size in bucket.sizes.items()],
            "integers": [*map(dump, padded.integers)],
            "reals": [*map(dump, padded.reals)],
            "outputs": [*map(_dump_output, padded.outputs)],
            "weights": [[numbers[id(whole_of(x))], list(x.shape)] for x in bucket.engine._weights.tensors],
        }

    def description() -> dict:
        return {
            "target": target,
            "shapes": _dump_shapes(shapes),
            "exports": [
                {
                    "ones": sorted(map(str, ones)),
                    "shapes": _dump_shapes(export.shapes),
                    "assertions": [
                        [dump(holds), told] for holds, told in (*export.assertions, *guard_expressions(export.shapes))
                    ],
                    "sizes": [[dump(symbol), list(own)] for symbol, own in sizes[ones].items()],
                }
                for ones, export in exports.items()
            ],
            "buckets": [described(*entry) for entry in every],
        }

    saved = [lambda place, bucket=bucket: bucket.engine._write(place, Weights()) for _, bucket in every]
    save_range_file(path, description, Weights([*wholes.values()], crc32), saved)


def _dump_shapes(shapes: ShapeRange) -> dict:
    # Such a signature only takes calls apart: it has no outputs, and its sizes are torch.export's own symbols.
    inputs = tuple(replace(spec, shape=(1,) * len(spec.shape)) for spec in shapes.signature.inputs)
    signature = replace(shapes.signature, inputs=inputs, out_spec=pytree.tree_structure(()))
    return {
        "signature": signature.to_json(),
        "shapes": [[*map(dump, shape)] for shape in shapes.shapes],
        "limits": [[dump(size), *limits] for size, limits in shapes.limits.items()],
    }


def _dump_output(known) -> list:
    """What is known of a result (PaddedProgram.outputs)."""
    if isinstance(known, tuple):
        return ["tensor", *([*map(dump, dim)] for dim in known)]
    if isinstance(known, Number):
        return ["number", known.kind.__name__, dump(known.expression)]
    return ["constant", known]
