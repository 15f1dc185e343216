"""The saved range: one zip file with an engine for each bucket, and all their weights once.

    weights            every weight of any bucket (weights_file.py)
    range.json         the shapes of calls, the sizes of buckets, and which weights each has
    bucket-0, …        a saved engine (artifact.py) for each bucket, without those weights
    manifest.json      format, versions, dtypes and shapes of the weights, their CRC-32, SHA-256 of the members above
    checksum           SHA-256 of manifest.json

What holds of an engine's file holds of this: nothing is pickled, buckets are code, checksums reveal damage.
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import tvm

from stof_tvm.report import Report
from stof_tvm.saving.archive import CHECKSUM, MANIFEST, opened, read, scratch, seal, unpack, why
from stof_tvm.saving.artifact import Artifact, load_artifact, project_version, read_report
from stof_tvm.saving.strict_json import read_json
from stof_tvm.saving.weights_file import Weights, is_description, mapped, write_weights
from stof_tvm.saving.whole_file import as_path, folder_beside, replacing
from tir_kernels.errors import ArtifactError

FORMAT = "range 1"
RANGE, WEIGHTS = "range.json", "weights"


@dataclass(frozen=True)
class SavedRange:
    """The parts of a range as they are saved; the buckets' code is loaded, the weights are mapped."""

    path: Path
    description: dict
    weights: Weights
    buckets: list[Artifact]

    def export_library(self, number: int, path) -> None:
        """Write the library of a bucket again, from the range's file; ArtifactError if that has changed."""
        with _member(self.path, number) as bucket:
            replace(self.buckets[number], path=bucket).export_library(path)


def save_range_file(
    path, description: Callable[[], dict], weights: Weights, buckets: Sequence[Callable[[Path], None]]
) -> None:
    """Write a range; the file appears whole or not at all.

    `buckets` write a bucket's artifact each.  Raises ArtifactError where the file cannot be written, and what `buckets`
    raise.
    """
    path = as_path(path)
    names = [RANGE, *map(_name, range(len(buckets)))]
    try:
        with folder_beside(path) as folder:
            (folder / RANGE).write_text(_text(description()))
            for name, save in zip(names[1:], buckets, strict=True):
                with _told_of(folder / name, str(path)):
                    save(folder / name)
            with replacing(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
                manifest = {
                    "format": FORMAT,
                    "project_version": project_version(),
                    "tvm_version": tvm.__version__,
                    "weights": write_weights(archive, WEIGHTS, weights),
                }
                seal(archive, folder, names, manifest)
    except ArtifactError:
        raise
    except OSError as error:
        raise ArtifactError(f"could not write {path}: {why(error, path)}") from error


def _text(description: dict) -> str:
    try:
        return json.dumps(description, allow_nan=False)  # what `read_json` reads
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"a constant among the model's results cannot be stored: {error}") from error


def is_range_file(path) -> bool:
    """Whether a file is an archive with the description of a range; what else it is, loading it tells."""
    try:
        with zipfile.ZipFile(as_path(path)) as archive:
            return RANGE in archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def load_range_file(path) -> SavedRange:
    """Read a range, after checking checksums, format, versions and machine; ArtifactError says which failed."""
    path = as_path(path)
    manifest, description, weights = _read_range(path)
    buckets = []
    for number in range(_count(manifest)):
        with _member(path, number) as bucket, _told_of(bucket, f"{bucket.name} of {path}"):
            buckets.append(load_artifact(bucket))
    return SavedRange(path, description, weights, buckets)


def read_range_reports(path) -> tuple[dict, dict, list[Report]]:
    """(manifest, description, the report of each bucket) of a range built for any machine: no code is loaded.

    Raises ArtifactError.
    """
    path = as_path(path)
    manifest, description, _ = _read_range(path)
    reports = []
    for number in range(_count(manifest)):
        with _member(path, number) as bucket, _told_of(bucket, f"{bucket.name} of {path}"):
            reports.append(read_report(bucket)[1])
    return manifest, description, reports


def _name(number: int) -> str:
    return f"bucket-{number}"


def _count(manifest: dict) -> int:
    """The number of buckets."""
    return len(manifest["sha256"]) - 1


def _read_range(path: Path) -> tuple[dict, dict, Weights]:
    """(manifest, description, weights) of a range's file."""
    with opened(path) as archive:
        manifest = _read_manifest(path, archive)
        description = read_json(read(archive, RANGE, manifest["sha256"][RANGE]))
        if not isinstance(description, dict):
            raise ArtifactError(f"{path} is not a whole saved range: {RANGE} is malformed")
        with open(path, "rb") as file:
            weights = mapped(file, archive.getinfo(WEIGHTS), manifest["weights"])
        return manifest, description, weights


def _read_manifest(path: Path, archive: zipfile.ZipFile) -> dict:
    manifest = read_json(read(archive, MANIFEST, archive.read(CHECKSUM).decode("ascii")))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise ArtifactError(
            f"{path} has format {str(found)[:40]}; this version reads {FORMAT!r} of ranges: build the engine again"
        )
    checksums = manifest.get("sha256")
    if not isinstance(checksums, dict) or not all(isinstance(x, str) for x in checksums.values()):
        raise ArtifactError(f"{path} is not a whole saved range: its manifest is malformed")
    members = [RANGE, *map(_name, range(_count(manifest)))]
    is_whole = sorted(archive.namelist()) == sorted((*members, WEIGHTS, MANIFEST, CHECKSUM))
    if sorted(checksums) != sorted(members) or not is_whole or not is_description(manifest.get("weights")):
        raise ArtifactError(f"{path} is not a whole saved range: its members are not those of its manifest")
    return manifest


@contextmanager
def _member(path: Path, number: int) -> Iterator[Path]:
    """The artifact of a bucket, in a temporary file."""
    with opened(path) as archive, scratch(path) as folder:
        name = _name(number)
        unpack(archive, name, _read_manifest(path, archive)["sha256"][name], folder / name)
        yield folder / name


@contextmanager
def _told_of(bucket: Path, name: str) -> Iterator[None]:
    """A context whose errors have a name in place of a temporary file's."""
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(str(error).replace(str(bucket), name)) from error.__cause__
