"""Files of JSON lines to which several processes append, and which survive the death of any of them."""

import contextlib
import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from stof_tvm.saving.strict_json import read_json
from stof_tvm.saving.whole_file import write_whole
from tir_kernels.errors import TuningLogError


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context in which no other process uses a folder's logs; without a lock where the folder is read-only."""
    try:
        handle = open(folder / ".lock", "w")
    except OSError:
        yield
        return
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class LineFile:
    """One such file.  Callers hold `locked` of its folder.

    A last line that is not whole, which a killed writer leaves, moves to `<name>.damaged` with a warning.  Any other
    damage raises TuningLogError.

    Parameters
    ----------
    path : Path
    checksums : Checksums, optional
        The checksums of the lines of this file and others.
    is_ordered : bool
        Whether lines are identified by their numbers, so that a checksum holds for a line with one number only.
    """

    def __init__(self, path: Path, checksums: "Checksums | None" = None, is_ordered: bool = False):
        self.path = path
        self.lines = 0  # read so far
        self._offset = 0
        self._checksums = checksums
        self._is_ordered = is_ordered

    def read_new(self) -> list:
        """(number of the line, value) of each line that was added since the last call; numbers count from 1."""
        found, new = [], self._new_lines()
        if self._checksums is not None:
            self._checksums.refresh()  # last: a writer adds a line's checksum before the line
        for line in new:
            self.lines += 1
            if self._checksums is not None and not self._checksums.has(self.checksum(line, self.lines)):
                raise self.damaged(self.lines, f"{self._checksums.path.name} does not have its checksum")
            with self.expecting(self.lines):
                found.append((self.lines, read_json(line)))
        return found

    @contextlib.contextmanager
    def expecting(self, line: int) -> Iterator[None]:
        """A context in which an error from an unexpected value in a line becomes TuningLogError."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise self.damaged(line, error) from None

    def damaged(self, line: int, reason) -> TuningLogError:
        return TuningLogError(f"{self.path}, line {line} is damaged: {reason}")

    def append(self, value) -> None:
        """Add one line; the caller has read all that came before."""
        line = json.dumps(value, separators=(",", ":")).encode()
        if self._checksums is not None:
            self._checksums.add(self.checksum(line, self.lines + 1))  # first: a line without one would count as damaged
        self._write(line + b"\n")

    def checksum(self, line: bytes, number: int) -> str:
        """The checksum of a line with a number."""
        return hashlib.sha256(b"%d:%b" % (number, line) if self._is_ordered else line).hexdigest()[:16]

    def _write(self, data: bytes) -> None:
        """Add whole lines."""
        with open(self.path, "ab") as file:  # closing it writes all of them, or raises where the disk is full
            file.write(data)
        self._offset += len(data)
        self.lines += data.count(b"\n")

    def _new_lines(self) -> list[bytes]:
        """The whole lines that came since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TuningLogError(f"{self.path} cannot be read: {error}") from None
        rest = data.rpartition(b"\n")[2]
        if rest:
            data = self._repair(data, rest)
        self._offset += len(data)
        return data.split(b"\n")[:-1]

    def _repair(self, data: bytes, rest: bytes) -> bytes:
        """The data to keep if they end within a line, `rest`: all of them if only the line's end is missing."""
        try:
            read_json(rest)
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


class Checksums(LineFile):
    """The checksums of all lines of the databases in a folder, in any order; a line without one is damaged.

    TVM's readers of modules and traces crash on some damaged ones, so damage has to be known before they see it.  A
    folder without this file, such as another program makes, is read as it is.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self._known = set()
        self._is_there = False

    def has(self, checksum: str) -> bool:
        """Whether a line with a checksum was added, or there are no checksums."""
        return not self._is_there or checksum in self._known

    def refresh(self) -> None:
        """Read what other processes added."""
        for number, value in self.read_new():
            with self.expecting(number):
                self._known.add(value)
        self._is_there = self.path.exists()

    def adopt(self, files: list[LineFile]) -> None:
        """Begin with the lines that `files` already have, all of which have been read; does nothing once begun."""
        if self._is_there:
            return
        checksums = []
        for file in files:
            lines = file.path.read_bytes().split(b"\n")[:-1] if file.path.exists() else []
            checksums += [file.checksum(line, number) for number, line in enumerate(lines, 1)]
        write_whole(self.path, _lines(checksums))
        self.refresh()

    def add(self, checksum: str) -> None:
        """Take in the checksum of a line that is about to be added."""
        self._write(_lines([checksum]))
        self._known.add(checksum)
        self._is_there = True


def _lines(checksums: list[str]) -> bytes:
    return "".join(f'"{checksum}"\n' for checksum in checksums).encode()
