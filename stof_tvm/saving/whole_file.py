"""Atomic writing of files: the old file stays until its replacement is complete."""

import contextlib
import errno
import os
import reprlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tir_kernels.errors import InputError


def as_path(path) -> Path:
    """A file's path as a Path; InputError for another type."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a path must be a str or a Path, got {type(path).__name__} {reprlib.repr(path)}")
    return Path(path)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file to write, which replaces `path` at the end; if anything fails, it is deleted.

    The temporary file has the same name, in another folder.  Raises OSError where the file cannot be written.
    """
    path = Path(path)
    with folder_beside(path) as folder:
        unfinished = folder / path.name
        yield unfinished
        os.replace(unfinished, path)


@contextlib.contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A temporary folder on the disk of `path`; an OSError about a file in it names `path` instead.

    IsADirectoryError where `path` is a folder.
    """
    beside = str(path.parent / f".{path.name}.")
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it", str(path))
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            yield Path(folder)
    except OSError as error:
        if str(error.filename).startswith((beside, os.path.abspath(beside))):
            error.filename, error.filename2 = str(path), None
        raise


def write_whole(path: str | Path, data: str | bytes) -> None:
    """Write a file, text in UTF-8.  OSError where it cannot be written."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(data.encode() if isinstance(data, str) else data)
