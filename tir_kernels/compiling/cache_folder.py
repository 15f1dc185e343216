"""Where compiled kernels are kept between processes."""

import functools
import os
import tempfile
import warnings
from pathlib import Path

from tir_kernels.compiling.own_folder import NAME, own_temporary_folder
from tir_kernels.compiling.without_home import is_without_home

NO_HOME = "this user has no home folder"


def cache_dir() -> Path:
    """$STOF_CACHE_DIR as it is, else stof_tvm under $XDG_CACHE_HOME or ~/.cache.

    Without a home that can be written, it is a folder of this user's under the temporary folder, with one warning per
    process.
    """
    if given := os.environ.get("STOF_CACHE_DIR"):
        return Path(given)
    return _default(os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"), tempfile.gettempdir())


@functools.cache  # keyed by everything that the folder depends on
def _default(xdg_cache_home: str | None, _home: str | None, _temporary: str) -> Path:
    try:
        folder = Path(xdg_cache_home or Path.home() / ".cache") / NAME
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK | os.X_OK):
            if is_without_home(xdg_cache_home):
                _warn(NO_HOME, folder)
            return folder
        reason = f"{folder} cannot be written"
    except OSError as error:
        reason = str(error)
    except RuntimeError:
        reason = NO_HOME
    folder = own_temporary_folder()
    _warn(reason, folder)
    return folder


def _warn(reason: str, folder: Path) -> None:
    warnings.warn(f"{reason}: compiled kernels are kept in {folder}; set STOF_CACHE_DIR to choose", stacklevel=5)
