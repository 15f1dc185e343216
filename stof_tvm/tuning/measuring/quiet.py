"""Measuring while nothing else computes: on a CPU, compiling and searching would falsify the measured time."""

import contextlib
import threading


class Quiet:
    """Work that may go on together, and measurements that go on alone; a measurement that waits lets no work begin.

    Parameters
    ----------
    is_needed : bool
        False, for a device that compiles nothing, lets everything go on together.
    """

    def __init__(self, is_needed: bool):
        self.is_needed = is_needed
        self.changed = threading.Condition()
        self.working, self.measuring, self.waiting = 0, False, 0

    @contextlib.contextmanager
    def work(self):
        """Within, nothing is measured."""
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
        """Within, nothing works and nothing else is measured."""
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
