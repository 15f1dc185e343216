"""TVM where the user has no home: importing it asks for one, and fails, as in a container with an arbitrary user."""

import os
import tempfile
from pathlib import Path

HOME = "HOME"


def let_tvm_be_imported() -> None:
    """Import TVM, where there is no home with the temporary folder in its place for as long as that takes."""
    try:
        Path.home()
        return
    except RuntimeError:
        os.environ[HOME] = tempfile.gettempdir()
    try:
        import tvm.contrib.pickle_memoize  # noqa: F401
    finally:
        del os.environ[HOME]
