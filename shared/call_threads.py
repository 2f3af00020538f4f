"""Threads for calls whose results nothing waits for: started on demand, kept for later calls, bounded in number.

`concurrent.futures.ThreadPoolExecutor` makes a future, with a condition of its own, for every call. A gateway hands
over four calls per answer, each of which reports its end itself. And a call for which it can start no thread is both an
error and called later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

import structlog

from shared.errors import Overloaded

log = structlog.get_logger()

_Call: TypeAlias = tuple[Callable[..., None], tuple[Any, ...]]


class CallThreads:
    """A pool of daemon threads. Thread-safe."""

    def __init__(self, name: str, max_threads: int) -> None:
        """
        Args:
            name: prefix of the threads' names; a number follows.
        """
        self._name = name
        self._max_threads = max_threads
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._num_threads = 0
        self._lacks_threads = False
        self._idle: list[SimpleQueue[_Call]] = []  # by which a thread gets its next call; the last used is used first
        self._waiting: deque[_Call] = deque()  # for a thread

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in a thread of the pool: at once, or when one is free if `max_threads` are busy.

        Raises:
            Overloaded: no thread is free, and no other can be started now. The function is not called.
        """
        call = function, args
        with self._lock:
            if not self._idle and self._num_threads >= self._max_threads:
                self._waiting.append(call)
                return
            if self._idle:
                calls = self._idle.pop()
            else:
                calls = SimpleQueue()
                name = f"{self._name}_{self._num_threads + 1}"
                try:
                    threading.Thread(target=self._run, args=(calls,), name=name, daemon=True).start()
                except (RuntimeError, MemoryError) as error:
                    if not self._lacks_threads:
                        log.error("thread_not_started", thread=name, reason=str(error))
                    self._lacks_threads = True
                    raise Overloaded("No thread can be started now. Try again shortly.") from error
                self._num_threads += 1
                self._lacks_threads = False
        calls.put(call)

    def _run(self, calls: SimpleQueue[_Call]) -> None:
        while True:
            call: _Call | None = calls.get()
            while call is not None:
                function, args = call
                try:
                    function(*args)
                except BaseException as error:  # a panic in Rust is no Exception; the thread serves other calls too
                    log.error("unhandled_exception", exc_info=error)
                del function, args, call  # the next call may be long in coming
                with self._lock:
                    call = self._waiting.popleft() if self._waiting else None
                    if call is None:
                        self._idle.append(calls)
