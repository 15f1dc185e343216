"""Python's collector of cyclic garbage runs less often while a model is compiled.

By default it looks after every 700 new objects that are not freed, and compiling makes millions that stay: expressions,
bindings, nodes of graphs.  So it found almost nothing thousands of times, for a tenth of a build.
"""

import contextlib
import gc

NEW_OBJECTS = 50_000  # between two collections of the youngest ones


@contextlib.contextmanager
def collected_seldom():
    """A context, or a decorator, in which `NEW_OBJECTS` objects are made before the collector looks at them.

    The thresholds belong to the whole process.  Where the caller has set a larger one, or none, it stays.
    """
    before = gc.get_threshold()
    if 0 < before[0] < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
