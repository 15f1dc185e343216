"""The lines of a user's own code that raised an error, without those of this project and of libraries."""

import sysconfig
import traceback
from pathlib import Path

import stof_tvm

OURS = Path(stof_tvm.__file__).parents[1]
PACKAGES = tuple(str(OURS / name) + "/" for name in ("stof_tvm", "relax_passes", "tir_kernels"))
LIBRARIES = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def model_lines(error: BaseException) -> str:
    """The user's frames of an error or of its deepest cause that has any, innermost last; "" where there are none."""
    frames = []
    seen: BaseException | None = error
    while seen is not None:
        found = [x for x in traceback.extract_tb(seen.__traceback__) if _is_theirs(x.filename)]
        frames = found or frames
        if isinstance(seen, SyntaxError) and seen.filename and _is_theirs(seen.filename):  # no frame is in that file
            return "".join(traceback.format_exception_only(seen)[:-1]).rstrip()
        seen = seen.__cause__ or seen.__context__
    return "".join(traceback.format_list(frames)).rstrip()


def _is_theirs(file: str) -> bool:
    is_library = file.startswith(PACKAGES + LIBRARIES) or "site-packages" in file
    return not is_library and Path(file).exists() and Path(file).name != "stof"  # compiled code's is not here
