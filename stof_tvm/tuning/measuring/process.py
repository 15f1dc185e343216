"""What every process of the search does first."""

import pickle
import sys

import cloudpickle

from tir_kernels.tuning.template_space import make_known


def start_process(templates: tuple = ()) -> str:
    """Lines of Python: find what this process finds, and leave Ctrl-C to it, who ends the others.

    `templates` are a user's own, which the process is to know too.
    """
    lines = [f"import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {sys.path!r}"]
    if templates:
        lines += [f"from {__name__} import receive", f"receive({cloudpickle.dumps(templates)!r})"]
    return "\n".join(lines)


def receive(pickled: bytes) -> None:
    """Know the templates that another process has sent."""
    make_known(pickle.loads(pickled))
