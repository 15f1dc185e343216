"""A stopwatch for the seconds that one thread spends in certain blocks of code."""

import time


class Stopwatch:
    """`with watch:` adds to `seconds`; it does not nest."""

    def __init__(self):
        self.seconds = 0.0

    def __enter__(self):
        self._started = time.perf_counter()

    def __exit__(self, *_):
        self.seconds += time.perf_counter() - self._started
