"""A cache in memory with a limit of bytes and entries, for values whose size is known."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Values by key; the least recently used ones are dropped first.  Threads may share it.

    Parameters
    ----------
    size : callable
        Maps a value to all bytes that it keeps in memory, including those of its key.
    most_bytes, most_entries : int
        What the cache holds at most.  A value that is larger by itself is not kept.
    """

    def __init__(self, size: Callable[[Value], int], most_bytes: int, most_entries: int):
        self.size, self.most_bytes, self.most_entries = size, most_bytes, most_entries
        self.entries: OrderedDict[Hashable, Value] = OrderedDict()
        self.bytes = 0
        self.lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        """The value of a key, None where there is none (any more)."""
        with self.lock:
            if key in self.entries:
                self.entries.move_to_end(key)
            return self.entries.get(key)

    def put(self, key: Hashable, value: Value) -> Value:
        """Keep a value and return it; if another thread's value came first, return that instead."""
        with self.lock:
            if key in self.entries:
                return self.entries[key]
            self.entries[key] = value
            self.bytes += self.size(value)
            self._drop()
            return value

    def limit(self, most_entries: int) -> None:
        """Keep at most this many entries from now on."""
        with self.lock:
            self.most_entries = most_entries
            self._drop()

    def _drop(self) -> None:
        while self.bytes > self.most_bytes or len(self.entries) > self.most_entries:
            self.bytes -= self.size(self.entries.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            self.entries.clear()
            self.bytes = 0
