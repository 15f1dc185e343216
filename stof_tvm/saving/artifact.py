"""The saved engine: one zip file with weights, the compiled library, signature and manifest, every member checksummed.

    weights            large constants, which an engine that is loaded reads where they lie in the mapped file
    signature.json     how the model is called and what it returns
    report.json        what the compiler did
    library.so         code and small constants
    kernels            machine code of the CUDA kernels whose source is in library.so, else empty (cuda/machine_code.py)
    manifest.json      format, versions, target, mask digests, the kernels whose masks may be replaced, sizes of memory
                       blocks, dtypes and shapes of the weights, their CRC-32 and the SHA-256 of the other members above
    checksum           SHA-256 of manifest.json

No member is pickled, but library.so is code: load artifacts only from where you would run a program from.  Checksums
reveal damage, not malice.  Nothing is used before its checksum is verified, the library is loaded last, and members are
unpacked under the names above, never under a name that the file gives.
"""

import contextlib
import json
import reprlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm

from stof_tvm.report import Report
from stof_tvm.running.machine import cpu_features, not_here
from stof_tvm.running.native_log import pass_on, without_noise
from stof_tvm.saving.archive import CHECKSUM, MANIFEST, SHOWN, opened, read, scratch, seal, unpack, why
from stof_tvm.saving.strict_json import read_json
from stof_tvm.saving.weights_file import Weights, is_description, mapped, write_weights
from stof_tvm.saving.whole_file import as_path, folder_beside, replacing
from stof_tvm.signature import Signature
from tir_kernels.compiling.forked import in_a_copy
from tir_kernels.compiling.load_library import load_library
from tir_kernels.cuda.machine_code import ready_code
from tir_kernels.errors import ArtifactError

FORMAT = 10  # 9: lists may have rows before the first token since, which its kernels do not expect
WEIGHTS = "weights"
SIGNATURE, REPORT, LIBRARY, KERNELS = MEMBERS = ("signature.json", "report.json", "library.so", "kernels")
STRINGS = ("project_version", "tvm_version", "target", "device")
DEVICES = {"cuda": "cuda", "llvm": "cpu"}  # by kind of target


@dataclass(frozen=True)
class Artifact:
    """The parts of an engine as they are saved; the manifest is JSON-serialisable, the library is loaded, the weights
    are mapped."""

    path: Path
    manifest: dict
    signature: Signature
    report: Report
    library: tvm.runtime.Module
    weights: Weights
    kernels: bytes

    def export_library(self, path) -> None:
        """Write the library again, from the artifact's file; ArtifactError if that file has changed."""
        with opened(self.path) as archive:
            try:
                unpack(archive, LIBRARY, self.manifest["sha256"][LIBRARY], Path(path))
            except OSError as error:
                raise ArtifactError(f"could not write {path}: {why(error, Path(path))}") from error


def save_artifact(
    path,
    *,
    target: str,
    device: str,
    masks: list[str],
    memory: list[int],
    weights: Weights,
    signature: str,
    report: dict,
    export_library,
    kernels: bytes = b"",
    mask_kernels: Sequence[dict] = (),
) -> None:
    """Write an artifact; the file appears whole or not at all.

    `export_library(path)` writes the compiled library, `kernels` is what `machine_code` gave for it, and `mask_kernels`
    is what `MaskArrays.to_json` returns.
    Raises ArtifactError where the file cannot be written.
    """
    path = as_path(path)
    try:
        with folder_beside(path) as folder:
            (folder / SIGNATURE).write_text(signature)
            (folder / REPORT).write_text(json.dumps(report))
            (folder / KERNELS).write_bytes(kernels)
            pass_on(in_a_copy(lambda: export_library(str(folder / LIBRARY))))
            # Stored, not deflated: weights do not compress, and no member can be larger than the file.
            with replacing(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
                manifest = {
                    "format": FORMAT,
                    "project_version": project_version(),
                    "tvm_version": tvm.__version__,
                    "target": target,
                    "device": device,
                    "cpu_features": cpu_features(target),
                    "masks": masks,
                    "memory": memory,
                    "mask_kernels": list(mask_kernels),
                    "weights": write_weights(archive, WEIGHTS, weights),
                }
                seal(archive, folder, MEMBERS, manifest)
    except ArtifactError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: no linker, or one that failed, or LLVM could not write
        raise ArtifactError(f"could not write {path}: {why(error, path)}") from error


def load_artifact(path) -> Artifact:
    """Read an artifact, after checking checksums, format, versions and machine; ArtifactError says which failed."""
    path = as_path(path)
    with opened(path) as archive, scratch(path) as folder:
        manifest = _read_manifest(path, archive)
        if (version := manifest["tvm_version"]) != tvm.__version__:
            raise ArtifactError(f"{path} was built with TVM {version[:SHOWN]}; this is TVM {tvm.__version__}")
        _check_machine(path, manifest)
        checksums = manifest["sha256"]
        signature = Signature.from_json(read(archive, SIGNATURE, checksums[SIGNATURE]).decode())
        report = _read_report(archive, manifest)
        with open(path, "rb") as file:
            weights = mapped(file, archive.getinfo(WEIGHTS), manifest["weights"])
        kernels = read(archive, KERNELS, checksums[KERNELS])
        unpack(archive, LIBRARY, checksums[LIBRARY], folder / LIBRARY)
        arch = read_json(manifest["target"]).get("arch")
        with without_noise(), ready_code(kernels, arch) if arch else contextlib.nullcontext():
            library = load_library(folder / LIBRARY)
    return Artifact(path, manifest, signature, report, library, weights, kernels)


def read_report(path) -> tuple[dict, Report]:
    """(manifest, report) of an artifact built for any machine: none of its code is loaded.

    Raises ArtifactError.
    """
    path = as_path(path)
    with opened(path) as archive:
        manifest = _read_manifest(path, archive)
        return manifest, _read_report(archive, manifest)


def _read_manifest(path: Path, archive: zipfile.ZipFile) -> dict:
    """The manifest of an archive, which has the members of an artifact of this format and no others."""
    manifest = read_json(read(archive, MANIFEST, archive.read(CHECKSUM).decode("ascii")))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise ArtifactError(
            f"{path} has format {str(found)[:40]}; this version reads format {FORMAT}: build the engine again"
        )
    names, wanted = sorted(archive.namelist()), sorted((CHECKSUM, MANIFEST, WEIGHTS, *MEMBERS))
    if names != wanted:
        raise ArtifactError(f"{path} has the members {reprlib.repr(names)}, not {wanted} of format {FORMAT}")
    checksums = manifest.get("sha256")
    is_sound = (
        all(isinstance(manifest.get(name), str) for name in STRINGS)
        and all(_is_list(manifest.get(name), str) for name in ("cpu_features", "masks"))
        and _is_list(manifest.get("memory"), int)
        and _is_list(manifest.get("mask_kernels"), dict)
        and all(size >= 0 for size in manifest["memory"])
        and is_description(manifest.get("weights"))
        and isinstance(checksums, dict)
        and all(isinstance(checksums.get(name), str) for name in MEMBERS)
        and DEVICES[read_json(manifest["target"])["kind"]] == manifest["device"]
    )
    if not is_sound:
        raise ArtifactError(f"{path} is not a whole saved engine: its manifest is malformed")
    return manifest


def _read_report(archive: zipfile.ZipFile, manifest: dict) -> Report:
    report = Report.from_dict(read_json(read(archive, REPORT, manifest["sha256"][REPORT])))
    if report.target != manifest["target"]:
        raise ArtifactError("the report is for another target than the manifest")
    return report


def _is_list(value, kind: type) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _check_machine(path: Path, manifest: dict) -> None:
    if manifest["device"] == "cuda" and not tvm.cuda(0).exist:
        raise ArtifactError(f"{path} was built for {manifest['target'][:SHOWN]}, and there is no CUDA GPU here")
    if missing := not_here(manifest["cpu_features"]):
        raise ArtifactError(f"{path} was built for a CPU with {', '.join(missing)[:SHOWN]}, which this one lacks")


def project_version() -> str:
    """The version of this project."""
    from stof_tvm import __version__

    return __version__
