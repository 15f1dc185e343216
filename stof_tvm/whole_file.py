"""Files that appear whole or not at all: what was there before stays until its replacement is complete."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end; where anything fails nothing is left of it.

    The name ends as `path` does.  Raises OSError where the file cannot be written.
    """
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        os.replace(unfinished, path)


def write_whole(path: str | Path, data: str | bytes) -> None:
    """Write a file, text in UTF-8.  OSError where it cannot be written."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(data.encode() if isinstance(data, str) else data)
