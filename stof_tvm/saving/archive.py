"""Archives whose members are stored as they are, each with a checksum: what saved engines and ranges are read from."""

import contextlib
import hashlib
import json
import re
import reprlib
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tir_kernels.errors import ArtifactError

SHOWN = 200  # characters of a file in a message
CHECKSUM, MANIFEST = "checksum", "manifest.json"


def why(error: Exception, path: Path) -> str:
    """An error's reason, for a message that names `path` already; it names `path` in place of temporary files."""
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        return f"there is no folder {path.parent}"
    if isinstance(error, OSError) and error.strerror and error.filename in (None, str(path)):
        return error.strerror
    return re.sub(rf"{re.escape(str(path.parent))}/\.{re.escape(path.name)}\.[^\s/:'\"]*", str(path), str(error))


@contextlib.contextmanager
def opened(path: Path):
    """The archive, all of whose members are uncompressed.  Errors within the context become ArtifactError."""
    if path.is_dir():
        raise ArtifactError(f"{path} is a folder; a saved engine is a file")
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}")
    is_none = f"{path} is not a whole saved engine, as engine.save writes it"
    try:
        if not zipfile.is_zipfile(path):
            raise ArtifactError(f"{is_none}: it is no zip archive, or only a part of one")
        with zipfile.ZipFile(path) as archive:
            if other := _other_archive(archive.namelist()):
                raise ArtifactError(f"{is_none}: {other}")
            for member in archive.infolist():
                # A few bytes of deflated data may stand for terabytes.
                if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                    raise ArtifactError(f"{path} is not a whole saved engine: {member.filename} is compressed")
            yield archive
    except ArtifactError:
        raise
    except Exception as error:  # zipfile may raise anything for damaged headers
        raise ArtifactError(f"{path} is not a whole saved engine: {str(error)[:SHOWN]}") from error


def _other_archive(names: list[str]) -> str | None:
    """What an archive of these members is, if nothing in it is a part of an engine."""
    if {CHECKSUM, MANIFEST} <= {*names}:
        return None
    if any(name.endswith("/data.pkl") for name in names):
        return "torch.save wrote it"
    return f"it is a zip archive of {reprlib.repr(names)}, without {CHECKSUM} or {MANIFEST}"


@contextlib.contextmanager
def scratch(path: Path):
    """A temporary folder to unpack into."""
    try:
        with tempfile.TemporaryDirectory(prefix="stof_") as folder:
            yield Path(folder)
    except OSError as error:
        raise ArtifactError(f"{path} could not be unpacked: {error}") from error


def read(archive: zipfile.ZipFile, name: str, checksum: str) -> bytes:
    """A member's bytes; ArtifactError where they do not have the checksum."""
    data = archive.read(name)
    _compare(archive, name, hashlib.sha256(data).hexdigest(), checksum)
    return data


def unpack(archive: zipfile.ZipFile, name: str, checksum: str, target: Path) -> None:
    """Write a member to a file; ArtifactError where it does not have the checksum."""
    with archive.open(name) as source, open(target, "wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    # The checksum is that of the file on the disk, because this file will be loaded.
    _compare(archive, name, sha256(target), checksum)


def seal(archive: zipfile.ZipFile, folder: Path, names: Sequence[str], manifest: dict) -> None:
    """Write a folder's files as members, and behind them the manifest, with their checksums, and its own."""
    sealed = {**manifest, "sha256": {name: sha256(folder / name) for name in names}}
    (folder / MANIFEST).write_text(json.dumps(sealed, indent=1))
    (folder / CHECKSUM).write_text(sha256(folder / MANIFEST))
    for name in (*names, MANIFEST, CHECKSUM):
        archive.write(folder / name, name)


def _compare(archive: zipfile.ZipFile, name: str, found: str, checksum: str) -> None:
    if found != checksum:
        raise ArtifactError(f"{name} in {archive.filename} does not have its checksum: the file was altered")


def sha256(path: Path) -> str:
    """The checksum of a file."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()
