"""The end of work that others wait for: its cancellation, and the hang-up of a client, which causes one.

The thread that processes a request waits for the engine or the fan-out and does not read the client's socket. One
thread per process therefore polls all of these sockets for the end of the peer's stream. This module knows sockets and
callbacks, neither the work nor who else ends it.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from shared.errors import ClientGone, TercetError
from shared.sockets import ONESHOT, PEER_CLOSED, Poller

# Makes a context manager from a function that cancels some work; it is entered while the work is done.
Cancelling: TypeAlias = Callable[[Callable[[], None]], AbstractContextManager[None]]


class Cancellation:
    """Whether some work is cancelled, and who must know when it is. Thread-safe.

    Attributes:
        cancel_reason: the error to answer with, if cancellation gave a reason.
    """

    def __init__(self) -> None:
        self.cancel_reason: TercetError | None = None
        self._lock = threading.RLock()  # a condition calls its methods in C, but has its own for a plain lock
        self._changed = threading.Condition(self._lock)
        self._is_cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self, reason: TercetError | None = None) -> None:
        """End the work. Of several reasons the first is kept."""
        with self._lock:
            if self._is_cancelled:
                return
            self.cancel_reason, self._is_cancelled = reason, True
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        for callback in callbacks:
            callback()

    def hang_up(self) -> None:
        """End the work because its client has closed the connection."""
        self.cancel(ClientGone("The client hung up before its answer was ready."))

    @contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """While the block runs, cancellation calls `callback`; at once, if it has come already."""
        with self._lock:
            self._callbacks.append(callback)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            callback()
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)

    def pause(self, seconds: float) -> None:
        """Sleep; cancellation ends it early."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_cancelled, timeout=seconds)


class HangupWatcher:
    """Runs a callback, once and in its own thread, when the peer of a watched socket closes or resets it.

    Shutting down only the sending half counts as closing: no HTTP client in use does that and keeps reading.
    """

    def __init__(self) -> None:
        self._poller = Poller()
        self._watched: dict[int, tuple[socket.socket, Callable[[], None]]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="hangups", daemon=True).start()

    @contextmanager
    def watching(self, sock: socket.socket | None, on_hangup: Callable[[], None]) -> Iterator[None]:
        """Watch `sock` while the block runs; `None` (an in-process test client has no socket) watches nothing."""
        if sock is None:
            yield
            return
        fd = sock.fileno()
        with self._lock:
            self._watched[fd] = (sock, on_hangup)
            self._poller.register(fd, PEER_CLOSED | ONESHOT)
        try:
            yield
        finally:
            with self._lock:
                del self._watched[fd]
                self._poller.unregister(fd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._poller.poll():
                with self._lock:
                    sock, on_hangup = self._watched.get(fd, (None, None))
                    # Another connection may have got this descriptor since the event was fetched.
                    is_closed = sock is not None and _is_closed(fd)
                if is_closed and on_hangup is not None:
                    on_hangup()


def _is_closed(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, PEER_CLOSED)
    return bool(poll.poll(0))
