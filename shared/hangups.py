"""Seeing that a client has hung up while its request is still being worked on.

A thread that waits for an answer does not read its client's socket, so somebody else must: one thread a
process waits on all of them for the peer's end of stream. It knows sockets and callbacks, nothing else.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class HangupWatcher:
    """Calls back, once and from its own thread, when the peer of a watched socket closes or resets it.

    A peer that only shuts down its sending half counts as gone too: no HTTP client in use does that and reads on.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[socket.socket, Callable[[], None]]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="hangups", daemon=True).start()

    @contextmanager
    def watching(self, sock: socket.socket | None, on_hangup: Callable[[], None]) -> Iterator[None]:
        """Watch while the block runs. `None` (no real socket, as in an in-process test client) watches nothing."""
        if sock is None:
            yield
            return
        fd = sock.fileno()
        with self._lock:
            self._watched[fd] = (sock, on_hangup)
            self._epoll.register(fd, _GONE | select.EPOLLONESHOT)
        try:
            yield
        finally:
            with self._lock:
                del self._watched[fd]
                self._epoll.unregister(fd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                with self._lock:
                    sock, on_hangup = self._watched.get(fd, (None, None))
                    # The number may have passed to another connection since the event was fetched.
                    is_gone = sock is not None and _is_gone(fd)
                if is_gone and on_hangup is not None:
                    on_hangup()


def _is_gone(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))
