"""Detects that a client has closed its connection while its request is still being processed.

The thread that processes a request waits for the engine or the fan-out and does not read the client's socket. One
thread per process therefore polls all of these sockets for the end of the peer's stream. This module knows sockets and
callbacks, not requests.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.sockets import ONESHOT, PEER_CLOSED, Poller


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
