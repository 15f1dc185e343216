"""Keep known noise of TVM's C++ code off stderr."""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterable

# TVM warns of every memory scope in an executable, although these scopes are correct, and of every library but the
# first, since all have bytecode under one name: it is read from a library, not from the process's table of such names.
NOISE = (b"Scope Saving:", b"Scope Loaded:", b"SystemLib symbol __tvm_ffi__library_bin")

_lock = threading.Lock()  # a thread that entered while another holds stderr would restore the wrong one


@contextlib.contextmanager
def without_noise():
    """Hold back what is written to file descriptor 2 and pass on, at the end, all but the lines of `NOISE`.

    C++ writes there past `sys.stderr`, so the descriptor itself is redirected.
    """
    sys.stderr.flush()
    with _lock, tempfile.TemporaryFile() as held:
        saved = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            pass_on(held)


def pass_on(lines: Iterable[bytes]) -> None:
    """Write lines to file descriptor 2, all but the noise."""
    for line in lines:
        if not any(noise in line for noise in NOISE):
            os.write(2, line)
