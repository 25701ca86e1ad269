"""A cache of bounded size for any number of threads, which makes each value once while there is room to keep it."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Keeps values of at most `most_bytes` in sum, those used last; for any number of threads."""

    def __init__(self, most_bytes: int, bytes_of: Callable[[Value], int]) -> None:
        self._most_bytes = most_bytes
        self._bytes_of = bytes_of
        self._kept: OrderedDict[Key, Future[Value]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of `key`, which `make` returns if it is not kept.

        A thread that wants what another is making waits for it. What `make` raises is raised in all of them,
        and not kept.
        """
        with self._lock:
            future = self._kept.get(key)
            mine = future is None
            if future is None:
                future = self._kept[key] = Future()
            self._kept.move_to_end(key)
        if mine:
            self._make(key, future, make)
        return future.result()

    def _make(self, key: Key, future: "Future[Value]", make: Callable[[], Value]) -> None:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._kept[key]
            future.set_exception(error)
            return
        future.set_result(value)
        with self._lock:
            self._bytes += self._bytes_of(value)
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        for key in list(self._kept):
            if self._bytes <= self._most_bytes:
                return
            if self._kept[key].done():
                self._bytes -= self._bytes_of(self._kept.pop(key).result())
