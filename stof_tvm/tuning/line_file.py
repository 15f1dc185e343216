"""Files of JSON lines that several processes append to, and that survive the death of any of them."""

import contextlib
import fcntl
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from tir_kernels.errors import TuningLogError


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within, no other process reads or writes the logs in a folder; only readers, where it cannot be written."""
    try:
        handle = open(folder / ".lock", "w")
    except OSError:
        yield
        return
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class LineFile:
    """One such file.  Every call is made within `locked` of its folder.

    A last line that is not whole, which a killed writer leaves, moves to `<name>.damaged` with a warning.  Any other
    damage raises TuningLogError.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lines = 0  # read so far
        self._offset = 0

    def read_new(self) -> list:
        """The values of the lines that came since the last call, (number of the line, value), counted from 1."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole, _, rest = data.rpartition(b"\n")
        if rest:
            data = self._repair(data, rest)
            whole = data.rpartition(b"\n")[0]
        found = []
        for line in whole.split(b"\n") if data else []:
            self.lines += 1
            with self.expecting(self.lines):
                found.append((self.lines, json.loads(line)))
        self._offset += len(data)
        return found

    @contextlib.contextmanager
    def expecting(self, line: int) -> Iterator[None]:
        """Within, a value of a line that is not what was written raises TuningLogError."""
        try:
            yield
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise self.damaged(line, error) from None

    def damaged(self, line: int, reason) -> TuningLogError:
        return TuningLogError(f"{self.path}, line {line} is damaged: {reason}")

    def append(self, value) -> None:
        """Add one line; the caller has read all that came before."""
        data = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        with open(self.path, "ab") as file:  # closing it writes all of the line, or raises where the disk is full
            file.write(data)
        self._offset += len(data)
        self.lines += 1

    def _repair(self, data: bytes, rest: bytes) -> bytes:
        """What stays of data that ends within a line: all of it where only the line's end is missing."""
        try:
            json.loads(rest)
        except ValueError:
            kept, added = data[: len(data) - len(rest)], b""
        else:
            kept, added = data, b"\n"
        number = self.lines + kept.count(b"\n") + 1
        if not os.access(self.path, os.W_OK):
            return kept + added
        with open(self.path, "r+b") as file:
            if added:
                file.seek(0, os.SEEK_END)
                file.write(added)
            else:
                damaged = self.path.with_name(self.path.name + ".damaged")
                with open(damaged, "ab") as other:
                    other.write(rest + b"\n")
                file.truncate(self._offset + len(kept))
                warnings.warn(f"{self.path}, line {number} is not whole and was moved to {damaged.name}", stacklevel=2)
        return kept + added
