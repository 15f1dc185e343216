"""A folder for caches under the temporary folder, for users whose home cannot hold them."""

import os
import stat
import tempfile
from pathlib import Path

NAME = "stof_tvm"


def own_temporary_folder() -> Path:
    """A folder that only this user can write, because this process runs the code that is stored there."""
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
