"""The start of every process of the search."""

import contextlib
import os
import pickle
import signal
import sys

import cloudpickle
from tvm.support.popen_pool import kill_child_processes

from tir_kernels.tuning.template_space import TEMPLATES, template_name


def start_process(templates: tuple = ()) -> str:
    """Lines of Python: find what this process finds, and leave Ctrl-C to it, who ends the others.

    `templates` are a user's own, which the process is to know too.
    """
    lines = [f"import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {sys.path!r}"]
    if templates:
        lines += [f"from {__name__} import receive", f"receive({cloudpickle.dumps(templates)!r})"]
    return "\n".join(lines)


def end_process(worker) -> None:
    """Kill the process of a PopenWorker, at once, whoever waits for its answer.

    The worker's own `kill` closes the pipes first, and closing waits for a thread that reads from them.
    """
    process = worker._proc
    if process is not None:
        with contextlib.suppress(ImportError, OSError, TypeError):
            kill_child_processes(process.pid)
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


def receive(pickled: bytes) -> None:
    """Know the templates that another process has sent: this one works for its search alone, and ends with it."""
    TEMPLATES.update({template_name(template): template for template in pickle.loads(pickled)})
