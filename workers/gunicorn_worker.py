"""The gunicorn worker class of the worker pool: one process, one slot, two generations during a reload.

It decides when a process accepts and when it stops; it knows nothing of models but what the app tells it
(warm or not). A HUP makes gunicorn fork the new generation and stop the old at once; so that no request
falls between, the incoming worker accepts only when it is warm, and the outgoing defers its stop until then.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from gunicorn.workers.gthread import ThreadWorker

if TYPE_CHECKING:
    from shared.leases import Leases
    from shared.plan import Slot
    from workers.app import SlotApp

# HTTP threads steal the interpreter from the engine thread for this long at a time; Python's default is 5 ms,
# the length of a decode step.
SWITCH_INTERVAL_S = 0.0005


# A thread that has answered waits for so long for its connection's next request. To be woken by the main thread takes
# twice the way, and three branches at once wait for it one after another.
STAY_MS = 5000


class HoldingSocket:
    """A connection's socket for one response. It sends the head with what follows it, and can hold the end together.

    gunicorn sends the head, each chunk and the chunk that ends the answer by themselves, and each wakes the gateway's
    thread, which waits for the interpreter then.
    """

    _LAST_CHUNK = b"0\r\n\r\n"

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._held = b""
        self._is_holding = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)

    def hold(self) -> None:
        """Keep what comes until the chunk that ends the answer."""
        self._is_holding = True

    def sendall(self, data: bytes) -> None:
        self._held += data
        if data == self._LAST_CHUNK or not (self._is_holding or data.startswith(b"HTTP/1.1 ")):
            self.flush()

    def flush(self) -> None:
        data, self._held = self._held, b""
        if data:
            self.socket.sendall(data)


class SlotWorker(ThreadWorker):  # type: ignore[misc]  # gunicorn has no type hints
    """A `gthread` worker that holds a slot. `slot` and `leases` are set by `gunicorn.conf.py` before the fork."""

    slot: Slot
    leases: Leases
    wsgi: SlotApp
    alive: bool

    def init_process(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._is_outgoing = False
        self._is_drained = False
        self._is_warm = False
        self._num_busy = 0  # threads that answer, or stay with a connection
        self._count_lock = threading.Lock()
        self._are_wanted = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # set where those that stay are to leave
        # Sockets are shared with an older generation: while it serves, a request must not land here.
        self._has_elder = len(self.leases.holders(self.slot.index)) > 1
        try:
            super().init_process()  # serves until the end
        finally:
            self.wsgi.close()

    def load_wsgi(self) -> None:
        super().load_wsgi()
        self.wsgi.start(
            age=self.age,
            num_failures=self.leases.num_failures(self.slot.index),
            on_change=self._wake,
        )

    def _wake(self) -> None:
        """Run the main loop once more; callable from any thread."""
        self.method_queue.defer(lambda: None)

    def notify(self) -> None:
        """The heartbeat, once in each turn of the main loop: also where state changes are acted upon."""
        super().notify()
        if not self._is_warm and self.wsgi.is_warm:
            self._is_warm = True
            gc.freeze()  # what is loaded stays: to look through it for garbage takes 60 ms, and everything waits
            self.leases.mark_warm(self.slot.index, self.age)
            self.set_accept_enabled(self.alive)
        if self._is_outgoing and self.leases.successor_is_warm(self.slot.index, self.age):
            self.alive = False
        if not self.alive and not self._is_drained:
            self._is_drained = True
            os.eventfd_write(self._are_wanted, 1)
            self.wsgi.drain(self.cfg.graceful_timeout)

    def enqueue_req(self, conn: Any) -> None:
        if self._num_busy >= self.cfg.threads:
            os.eventfd_write(self._are_wanted, 1)
        super().enqueue_req(conn)

    def handle(self, conn: Any) -> object:
        """As gunicorn has it, but the thread stays for the connection's next request, if that comes soon."""
        with self._count_lock:
            self._num_busy += 1
        try:
            while True:
                result = super().handle(conn)
                if result is not True or not self._hears_more(conn):
                    return result
        finally:
            with self._count_lock:
                self._num_busy -= 1

    def _hears_more(self, conn: Any) -> bool:
        # As many stay as branches may run; the other threads are left for whoever comes on another connection.
        if not self.alive or self._num_busy > self.slot.max_batch:
            return False
        if conn.parser.unreader.buf.getvalue():  # read already: that does not make the socket readable
            return True
        poll = select.poll()
        poll.register(conn.sock, select.POLLIN)
        poll.register(self._are_wanted, select.POLLIN)
        ready = dict(poll.poll(STAY_MS))
        if self._are_wanted in ready and self.alive:  # an ending worker's stay set, for those that come to look
            with suppress(BlockingIOError):  # another has been quicker
                os.eventfd_read(self._are_wanted)
        return conn.sock.fileno() in ready

    def handle_request(self, req: Any, conn: Any) -> bool:
        sock = conn.sock
        conn.sock = holding = HoldingSocket(sock)
        try:
            keeps_connection: bool = super().handle_request(req, conn)
            holding.flush()
        finally:
            conn.sock = sock
        return keeps_connection

    def set_accept_enabled(self, enabled: bool) -> None:
        """An incoming generation does not accept before it is warm."""
        super().set_accept_enabled(enabled and (self._is_warm or not self._has_elder))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """TERM. An outgoing generation goes on until its successor is warm; a second TERM ends that."""
        if not self._is_outgoing and self.leases.is_superseded(self.slot.index, self.age):
            self._is_outgoing = True
            self._wake()
        else:
            super().handle_exit(sig, frame)
