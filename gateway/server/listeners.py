"""The sockets at which the server listens, and the connections that wait in their backlogs."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from shared.sockets import PollPoller

# Before what has arrived on other connections is read.
_ACCEPTS_AT_ONCE = 8
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Listeners:
    """
    Attributes:
        are_open: connections are taken. While a predecessor serves, it takes them.
        by_descriptor: the sockets, by their descriptors.
    """

    def __init__(
        self,
        sockets: Iterable[Any],
        poller: PollPoller,
        take: Callable[[socket.socket, Any, Any], None],
        on_exhaustion: Callable[[socket.socket | None], None],
    ) -> None:
        """
        Args:
            take: gets the sockets of new connections, and the addresses of the client and of the listener.
            on_exhaustion: called when no descriptor is left. Gets a connection that is to be refused, if there is one.
        """
        self.are_open = False
        self.by_descriptor = {listener.fileno(): listener for listener in sockets}
        self._poller = poller
        self._take = take
        self._on_exhaustion = on_exhaustion
        self._spare_file = open(os.devnull, "rb")  # noqa: SIM115

    def open(self) -> None:
        self.are_open = True
        for descriptor, listener in self.by_descriptor.items():
            listener.setblocking(False)
            self._poller.register(descriptor, select.POLLIN)

    def accept(self, descriptor: int) -> bool:
        """Take connections from a backlog. Returns whether more may wait there."""
        listener = self.by_descriptor[descriptor]
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, client = listener.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._refuse_with_spare_descriptor(listener)
                return False
            self._take(sock, client, listener.getsockname())
        return True

    def close(self) -> None:
        """Take the connections that wait, then close. The kernel resets what is left in a backlog. Those of a
        predecessor that serves are left to it."""
        for descriptor, listener in self.by_descriptor.items():
            while self.are_open and self.accept(descriptor):
                pass
            with suppress(OSError, KeyError):
                self._poller.unregister(descriptor)
            listener.close()
        self.by_descriptor = {}  # a thread may have polled an event of theirs
        self._spare_file.close()

    def _refuse_with_spare_descriptor(self, listener: Any) -> None:
        sock = None
        with suppress(OSError):
            self._spare_file.close()
            sock, _ = listener.accept()
        self._on_exhaustion(sock)
        with suppress(OSError):
            self._spare_file = open(os.devnull, "rb")  # noqa: SIM115
