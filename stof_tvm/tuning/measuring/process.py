"""What every process of the search does first."""

import sys


def start_process() -> str:
    """A line of Python: find what this process finds, and leave Ctrl-C to it, who ends the others."""
    return f"import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {sys.path!r}"
