"""Attributes of transformers' configurations that have another value while a model is exported."""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator


class Override:
    """The value `replacement` of attribute `name`, for configurations that have one of the values `replaced`.

    Any number of threads may be in contexts at once; the last to leave restores a configuration's own value.
    """

    def __init__(self, name: str, replaced: tuple, replacement):
        self.name, self.replaced, self.replacement = name, replaced, replacement
        self._before: dict[int, object] = {}  # a configuration's own value by its id; guarded by _lock, as the counts
        self._contexts: collections.Counter = collections.Counter()
        self._lock = threading.Lock()

    def concerns(self, config) -> bool:
        """Whether a configuration has a value that is replaced, now or outside of the contexts."""
        return id(config) in self._contexts or getattr(config, self.name, self.replacement) in self.replaced

    @contextlib.contextmanager
    def context(self, find: Callable[[], list]) -> Iterator[None]:
        """A context in which the configurations that `find()` gives have the other value."""
        with self._lock:
            configs = [config for config in find() if self.concerns(config)]
            for config in configs:
                self._before.setdefault(id(config), getattr(config, self.name, None))
                self._contexts[id(config)] += 1
                setattr(config, self.name, self.replacement)
        try:
            yield
        finally:
            with self._lock:
                for config in configs:
                    self._contexts[id(config)] -= 1
                    if not self._contexts[id(config)]:
                        del self._contexts[id(config)]
                        setattr(config, self.name, self._before.pop(id(config)))
