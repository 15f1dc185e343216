"""A home for TVM where the user has none (a container with an arbitrary user): importing TVM needs one."""

import os
from pathlib import Path

from tir_kernels.compiling.own_folder import own_temporary_folder

CACHES = "XDG_CACHE_HOME"

_named: str | None = None  # the value that this module gave to $XDG_CACHE_HOME


def name_a_folder_for_caches() -> None:
    """If the user has no home, set $XDG_CACHE_HOME, which TVM then uses instead, to a folder of this user's.

    The variable stays set, so that the search's worker processes, which import TVM before this project, inherit it.
    """
    global _named
    if CACHES in os.environ:
        return
    try:
        Path.home()
    except RuntimeError:
        os.environ[CACHES] = _named = str(own_temporary_folder())


def is_without_home(caches: str | None) -> bool:
    """Whether this value of $XDG_CACHE_HOME stands in for a home that is missing."""
    return caches is not None and caches == _named
