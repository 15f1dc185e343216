"""A lock for measurements on CPUs: compiling or searching beside one would falsify its time."""

import contextlib
import threading


class Quiet:
    """Lets work run in parallel and measurements run alone; no work begins while a measurement waits.

    Parameters
    ----------
    is_needed : bool
        False lets everything run in parallel, for measurements on a GPU, which does not compile.
    """

    def __init__(self, is_needed: bool):
        self.is_needed = is_needed
        self.changed = threading.Condition()
        self.working, self.measuring, self.waiting = 0, False, 0

    @contextlib.contextmanager
    def work(self):
        """A context in which nothing is measured."""
        if not self.is_needed:
            yield
            return
        with self.changed:
            self.changed.wait_for(lambda: not self.measuring and not self.waiting)
            self.working += 1
        try:
            yield
        finally:
            with self.changed:
                self.working -= 1
                self.changed.notify_all()

    @contextlib.contextmanager
    def measurement(self):
        """A context in which no work runs and nothing else is measured."""
        if not self.is_needed:
            yield
            return
        with self.changed:
            self.waiting += 1
            try:
                self.changed.wait_for(lambda: not self.measuring and not self.working)
                self.measuring = True
            finally:
                self.waiting -= 1
        try:
            yield
        finally:
            with self.changed:
                self.measuring = False
                self.changed.notify_all()
