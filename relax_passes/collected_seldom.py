"""Python's collector of cyclic garbage runs less often while a model is compiled.

By default it looks after every 700 new objects that are not freed, and compiling makes millions that stay: expressions,
bindings, nodes of graphs.  So it found almost nothing thousands of times, for a tenth of a build.
"""

import contextlib
import gc
import threading

NEW_OBJECTS = 50_000  # between two collections of the youngest ones

_lock = threading.Lock()
_inside = 0  # contexts that are entered, of all threads; the first one changes the thresholds
_before = gc.get_threshold()  # those before that, which the last one restores


@contextlib.contextmanager
def collected_seldom():
    """A context, or a decorator, in which `NEW_OBJECTS` objects are made before the collector looks at them.

    The thresholds belong to the whole process: they are restored when the last thread leaves.  Where the caller has set
    a larger one, or none, it stays.
    """
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = gc.get_threshold()
            if 0 < _before[0] < NEW_OBJECTS:
                gc.set_threshold(NEW_OBJECTS, *_before[1:])
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_before)
