"""How the processes of the search are started and ended."""

import contextlib
import os
import pickle
import signal
import sys

import cloudpickle
from tvm.support.popen_pool import kill_child_processes

from tir_kernels.tuning.template_space import TEMPLATES, template_name


def start_process(templates: tuple = ()) -> str:
    """Python source that a new process runs first.

    It lets the process import what this one can import, ignore Ctrl-C (this process handles it and ends the others),
    and know `templates`, the user's own.
    """
    lines = [f"import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {sys.path!r}"]
    if templates:
        lines += [f"from {__name__} import receive", f"receive({cloudpickle.dumps(templates)!r})"]
    return "\n".join(lines)


def end_process(worker) -> None:
    """Kill the process of a PopenWorker at once, even while a thread waits for its answer.

    The worker's own `kill` closes the pipes first, which waits for the thread that reads from them.
    """
    process = worker._proc
    if process is not None:
        with contextlib.suppress(ImportError, OSError, TypeError):
            kill_child_processes(process.pid)
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


def receive(pickled: bytes) -> None:
    """Register templates that the searching process sent; this process works for that search only."""
    TEMPLATES.update({template_name(template): template for template in pickle.loads(pickled)})
