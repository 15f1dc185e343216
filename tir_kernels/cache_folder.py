"""Where compiled kernels are kept between processes."""

import functools
import os
import stat
import tempfile
import warnings
from pathlib import Path

NAME = "stof_tvm"


def cache_dir() -> Path:
    """$STOF_CACHE_DIR as it is, else stof_tvm under $XDG_CACHE_HOME or ~/.cache.

    Where there is no home, or none that can be written, a folder of this user's under the temporary folder; that is
    warned of once in a process.
    """
    if given := os.environ.get("STOF_CACHE_DIR"):
        return Path(given)
    return _default(os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"), tempfile.gettempdir())


@functools.cache  # by what it depends on
def _default(xdg_cache_home: str | None, _home: str | None, _temporary: str) -> Path:
    try:
        folder = Path(xdg_cache_home or Path.home() / ".cache") / NAME
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        reason = f"{folder} cannot be written"
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        reason = str(error)
    folder = _own_temporary_folder()
    warnings.warn(f"{reason}: compiled kernels are kept in {folder}; set STOF_CACHE_DIR to choose", stacklevel=4)
    return folder


def _own_temporary_folder() -> Path:
    """A folder that only this user can write: what others can write there, this process would run."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir(), f"{NAME}-{user}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(folder)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077:
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix=f"{NAME}-"))
