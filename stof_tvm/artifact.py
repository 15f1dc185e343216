"""The saved engine: one zip file with a manifest, the signature and the compiled library, every member checksummed.

    manifest.json    format, versions, target, mask digests, sizes of memory blocks, SHA-256 of each other member
    signature.json   how the model is called and what it returns
    report.json      what the compiler did
    library.so       code and weights

No member is pickled, but library.so is code: load artifacts only from where you would run a program from.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import tvm

from stof_tvm.native_log import without_noise
from tir_kernels.errors import ArtifactError

FORMAT = 3
MEMBERS = ("signature.json", "report.json", "library.so")


@dataclass(frozen=True)
class Artifact:
    """The parts of an engine as they are saved: JSON-serialisable dicts, the signature's JSON, the loaded library."""

    path: Path
    manifest: dict
    signature: str
    report: dict
    library: tvm.runtime.Module

    def export_library(self, path) -> None:
        """Write the library again, from the file that this artifact was read from; ArtifactError if that changed."""
        _extract_member(self.path, "library.so", self.manifest["sha256"]["library.so"], Path(path))


def save_artifact(
    path,
    *,
    target: str,
    device: str,
    masks: list[str],
    memory: list[int],
    signature: str,
    report: dict,
    export_library,
) -> None:
    """Write an artifact; the file appears whole or not at all.

    `export_library(path)` writes the compiled library.  Raises ArtifactError where the file cannot be written.
    """
    path = Path(path)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent or ".", prefix=f".{path.name}.") as folder:
            folder = Path(folder)
            (folder / "signature.json").write_text(signature)
            (folder / "report.json").write_text(json.dumps(report))
            with without_noise():
                export_library(str(folder / "library.so"))
            manifest = {
                "format": FORMAT,
                "project_version": project_version(),
                "tvm_version": tvm.__version__,
                "target": target,
                "device": device,
                "cpu_features": _cpu_features(target),
                "masks": masks,
                "memory": memory,
                "sha256": {name: _sha256(folder / name) for name in MEMBERS},
            }
            (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
            # Stored, not deflated: weights do not compress, and loading stays a plain read.
            with zipfile.ZipFile(folder / "artifact", "w", zipfile.ZIP_STORED) as archive:
                for name in ("manifest.json", *MEMBERS):
                    archive.write(folder / name, name)
            os.replace(folder / "artifact", path)
    except ArtifactError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: TVM found no linker, or the linker failed
        raise ArtifactError(f"could not write {path}: {error}") from error


def load_artifact(path) -> Artifact:
    """Read an artifact, after checking format, versions, machine and checksums; ArtifactError says which failed."""
    path = Path(path)
    with _whole(path), tempfile.TemporaryDirectory(prefix="stof_") as folder:
        manifest = _extract(path, Path(folder))
        with without_noise():
            # The library stays mapped after its file is gone.
            library = tvm.runtime.load_module(str(Path(folder, "library.so")))
        signature = Path(folder, "signature.json").read_text()
        report = json.loads(Path(folder, "report.json").read_text())
        return Artifact(path, manifest, signature, report, library)


def read_report(path) -> tuple[dict, dict]:
    """(manifest, report) of an artifact for whatever machine: checked like the whole, but none of its code is loaded.

    Raises ArtifactError.
    """
    path = Path(path)
    with _whole(path), tempfile.TemporaryDirectory(prefix="stof_") as folder:
        manifest = _read_manifest(path)
        _extract_member(path, "report.json", manifest["sha256"]["report.json"], Path(folder, "report.json"))
        return manifest, json.loads(Path(folder, "report.json").read_text())


@contextlib.contextmanager
def _whole(path: Path):
    """Within, whatever a damaged artifact leads to is an ArtifactError."""
    try:
        yield
    except FileNotFoundError:
        raise ArtifactError(f"there is no file {path}") from None
    except (
        zipfile.BadZipFile,
        KeyError,
        ValueError,
        EOFError,
        OSError,
        TypeError,
        AttributeError,
        NotImplementedError,
    ) as error:
        raise ArtifactError(f"{path} is not a whole saved engine: {error}") from error


def _read_manifest(path: Path) -> dict:
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    if manifest["format"] != FORMAT:
        raise ArtifactError(f"{path} has format {manifest['format']!r}; this version reads format {FORMAT}")
    return manifest


def _extract(path: Path, folder: Path) -> dict:
    manifest = _read_manifest(path)
    with zipfile.ZipFile(path) as archive:
        if manifest["tvm_version"] != tvm.__version__:
            raise ArtifactError(f"{path} was built with TVM {manifest['tvm_version']}; this is TVM {tvm.__version__}")
        _check_machine(path, manifest)
        if set(archive.namelist()) != {"manifest.json", *MEMBERS}:
            raise ArtifactError(
                f"{path} has the members {sorted(archive.namelist())}, not {sorted(['manifest.json', *MEMBERS])}"
            )
    for name in MEMBERS:
        _extract_member(path, name, manifest["sha256"][name], folder / name)
    return manifest


def _extract_member(path: Path, name: str, checksum: str, target: Path) -> None:
    with zipfile.ZipFile(path) as archive, archive.open(name) as source, open(target, "wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    if _sha256(target) != checksum:
        raise ArtifactError(f"{name} in {path} does not have the checksum of the manifest: the file was altered")


def _check_machine(path: Path, manifest: dict) -> None:
    if manifest["device"] == "cuda" and not tvm.cuda(0).exist:
        raise ArtifactError(f"{path} was built for {manifest['target']}, and there is no CUDA GPU here")
    here = _cpu_features(json.dumps({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()}))
    if missing := sorted(set(manifest["cpu_features"]) - set(here)):
        raise ArtifactError(f"{path} was built for a CPU with {', '.join(missing)}, which this one lacks")


def _cpu_features(target: str) -> list[str]:
    """LLVM's names of the instruction sets that code for an LLVM target may use; none for CUDA's host code."""
    target = tvm.target.Target(json.loads(target))
    if target.kind.name != "llvm":
        return []
    return sorted(str(name) for name in tvm.target.codegen.llvm_get_cpu_features(target))


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


def project_version() -> str:
    """The version of this project."""
    from stof_tvm import __version__

    return __version__
