"""Disks that are full and folders that cannot be written, for root too."""

import contextlib
import os
import resource
from pathlib import Path

NOBODY = 65534


@contextlib.contextmanager
def full_after(size: int):
    """Within, no file of this process or of those that it starts grows beyond so many bytes: as on a full disk, `write`
    fails (EFBIG in place of ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def read_only(folder: Path):
    """Within, this process may read a folder and what is in it, but not write there."""
    paths = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    parents = {path: path.stat().st_mode for path in folder.parents if path.stat().st_uid == os.getuid()}
    for path, mode in (modes | parents).items():
        # Root's temporary folders are for root alone.
        path.chmod(
            mode & ~0o222 | 0o555 if path in modes and path.is_dir() else mode | 0o555 if path.is_dir() else 0o444
        )
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path, mode in (modes | parents).items():
            path.chmod(mode)


def snapshot(folder: Path) -> dict[str, bytes]:
    """The files of a folder and what they hold, but for locks."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if _is_kept(path)}


def _is_kept(path: Path) -> bool:
    return path.is_file() and path.name != ".lock"
