"""Client connections of the gateway: reads requests and writes responses without blocking.

A thread is needed only while a request is being answered. Until a request is complete, and while its response waits for
a slow client, its socket is polled with all others. So a client that sends a header byte by byte, or never reads, costs
a descriptor and a bounded buffer, and no thread.

`request_parser` reads the requests. Nothing is read from a client while one of its requests is answered; what has
arrived behind it waits, and an error in it ends the connection after the answer.
"""

from __future__ import annotations

import enum
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gateway.server.request_parser import Request, RequestParser
from gateway.server.served_app import Arrival
from gateway.server.tls_socket import TlsSocket
from shared.errors import TercetError

# A refused upload costs one read and what lingering discards: 64 KiB at most.
READ_BYTES = 32 << 10
# A response that a client does not read waits in memory up to this size: eight streams of 256 tokens take 300 kB.
MAX_UNSENT_BYTES = 4 << 20
# After the last response, so that it is not lost in a reset: how much more of the request is read and discarded, and
# for how long.
LINGER_BYTES = 28 << 10
LINGER_S = 2.0

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Phase(enum.Enum):
    """What a connection does.

    `IDLE`: no byte of the next request has arrived. `READY`: a complete request waits for a thread.
    """

    HANDSHAKE = enum.auto()
    IDLE = enum.auto()
    READING = enum.auto()
    READY = enum.auto()
    ANSWERING = enum.auto()
    FLUSHING = enum.auto()
    LINGERING = enum.auto()
    CLOSED = enum.auto()


class Step(enum.Enum):
    """What is to be done next with a connection."""

    WAIT_TO_READ = enum.auto()
    WAIT_TO_WRITE = enum.auto()
    ADMIT = enum.auto()  # the head has arrived
    ANSWER = enum.auto()  # a request is complete
    REFUSE = enum.auto()  # it is no valid request: `refusal` says why
    NOTHING = enum.auto()  # a thread answers, and nothing waits to be sent
    CLOSE = enum.auto()


class Connection:
    """One client. Its server calls everything but `ResponseSocket`'s methods under a lock."""

    def __init__(
        self,
        sock: socket.socket,
        client: Any,
        server: Any,
        *,
        now: float,
        max_body_bytes: int,
        charge: Callable[[Arrival, int], None],
        tls: ssl.SSLContext | None,
    ) -> None:
        """
        Args:
            client, server: the addresses, as gunicorn takes them.
            now: `time.monotonic()` time, as in all methods.
            max_body_bytes: a longer body is not read; its head is answered.
            charge: counts bytes of a body in chunks; raises the error with which the request is refused.
        """
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.client = client
        self.server = server
        self.phase = Phase.IDLE
        self.num_counted_bytes = 0  # of those that the parser holds, in the server's sum
        self.since = now  # when the phase began, or when the client last accepted data
        self.parser = RequestParser(max_body_bytes)
        self._charge = charge
        self.refusal: TercetError | None = None
        self._num_discarded = 0
        self.arrival: Arrival | None = None  # of the request that arrives, waits or is answered
        self.is_pipelining = False  # the request was sent before the response to the last one
        self._sock = sock
        self._tls = None if tls is None else TlsSocket(sock, tls)
        if self._tls is not None:
            self.phase = Phase.HANDSHAKE
        self.response = ResponseSocket(self._tls or sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_arrived(self) -> bool:
        """Whether the client has sent something, or closed, that was not read yet."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def has_unsent(self) -> bool:
        return self.response.has_unsent

    def advance(self, now: float) -> Step:
        """Do what the socket is ready for.

        Raises:
            OSError: the connection failed; it is to be closed. `ssl.SSLError` is one.
        """
        match self.phase:
            case Phase.HANDSHAKE:
                return self._advance_handshake(now)
            case Phase.IDLE | Phase.READING:
                return self._advance_reading(now)
            case Phase.ANSWERING:
                return self._flush(now, Step.NOTHING)
            case Phase.FLUSHING:
                return self._flush(now, Step.CLOSE)
            case Phase.LINGERING:
                return self._advance_lingering()
            case _:
                return Step.CLOSE

    def take_request(self, now: float) -> Request:
        """The request that waited, which a thread answers from now on; one that is refused without its body."""
        assert self.arrival is not None
        self._set_phase(Phase.ANSWERING, now)
        return self.parser.take() if self.arrival.refusal is None else self.parser.take_refused()

    def read_body(self, arrival: Arrival) -> Step:
        """The request may come: go on with what has arrived of its body."""
        self.arrival = arrival
        step = self._next_request(num_new_bytes=self.parser.num_received_bytes)
        if step is Step.WAIT_TO_READ and self.parser.expects_continue:
            self.response.sendall(_CONTINUE)
        return step

    def wait_for_thread(self, now: float) -> None:
        """A request is complete, or refused, and waits."""
        self._set_phase(Phase.READY, now)

    def finish_response(self, now: float, *, keeps_connection: bool) -> Step:
        """The thread has handed over the whole response.

        Raises:
            OSError: as `advance`.
        """
        self.arrival = None
        if not keeps_connection:
            self._set_phase(Phase.FLUSHING, now)
            return self._flush(now, Step.CLOSE)
        self.is_pipelining = self.parser.num_bytes > 0
        self._set_phase(Phase.READING if self.is_pipelining else Phase.IDLE, now)
        if self.has_unsent:
            # The next request waits until the client has taken this response: a client that only sends is not served.
            step = self._flush(now, Step.WAIT_TO_READ)
            if step is not Step.WAIT_TO_READ:
                return step
        return self._next_request()

    def begin_linger(self, now: float) -> Step:
        """End the sending side after the last response, and keep reading for a moment.

        A socket that is closed with unread data sends a reset, which may overtake the response.
        """
        self._set_phase(Phase.LINGERING, now)
        if self._tls is not None:
            self._tls.end()
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return Step.CLOSE
        return Step.WAIT_TO_READ

    def send_plain(self, data: bytes) -> None:
        """Send without TLS, to a client that began without it."""
        with suppress(OSError):
            self._sock.send(data)

    def abort(self) -> None:
        """End both directions now. A thread that still answers gets an error at its next send."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.phase = Phase.CLOSED
        self.parser.clear()
        with suppress(OSError):
            self._sock.close()

    def _set_phase(self, phase: Phase, now: float) -> None:
        self.phase = phase
        self.since = now

    def _advance_handshake(self, now: float) -> Step:
        assert self._tls is not None
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return Step.WAIT_TO_READ
        except ssl.SSLWantWriteError:
            return Step.WAIT_TO_WRITE
        self._set_phase(Phase.IDLE, now)
        return self._advance_reading(now)

    def _advance_reading(self, now: float) -> Step:
        if self.has_unsent:
            step = self._flush(now, Step.WAIT_TO_READ)
            if step is not Step.WAIT_TO_READ:
                return step
            if self.parser.num_bytes:
                return self._next_request()
        try:
            data = (self._tls or self._sock).recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return Step.WAIT_TO_READ
        if not data:
            return Step.CLOSE
        if self.phase is Phase.IDLE:
            self._set_phase(Phase.READING, now)
        return self._next_request(data, len(data))

    def _next_request(self, data: bytes = b"", num_new_bytes: int = 0) -> Step:
        """What is to be done with what has been received, of which `num_new_bytes` have not been charged."""
        try:
            if self.arrival is not None and self.parser.is_chunked:
                self._charge(self.arrival, num_new_bytes)
            is_complete = self.parser.advance(data)
        except TercetError as error:
            self.refusal = error
            return Step.REFUSE
        if self.parser.head is not None and self.arrival is None:
            return Step.ADMIT
        if is_complete:
            return Step.ANSWER
        # A poll of the socket does not show an end that TLS has read.
        return Step.CLOSE if self._tls is not None and self._tls.has_ended else Step.WAIT_TO_READ

    def _flush(self, now: float, then: Step) -> Step:
        has_progress, is_done = self.response.flush()
        if has_progress:
            self.since = now
        if not is_done:
            return Step.WAIT_TO_WRITE
        return self.begin_linger(now) if then is Step.CLOSE else then

    def _advance_lingering(self) -> Step:
        try:
            while self._num_discarded < LINGER_BYTES:
                data = self._sock.recv(LINGER_BYTES - self._num_discarded)  # encrypted with TLS
                if not data:
                    return Step.CLOSE
                self._num_discarded += len(data)
        except BlockingIOError:
            return Step.WAIT_TO_READ
        return Step.NOTHING  # more is not read; the deadline closes the connection


class ResponseSocket:
    """What a response is written to. Never blocks: what the client does not take at once waits in memory.

    A thread calls `sendall` while it answers, and another one `flush` when the socket is writable again.
    """

    def __init__(self, sock: socket.socket | TlsSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self.on_unsent: Callable[[], None] = lambda: None  # called in the thread that sends, when data begins to wait

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def num_unsent_bytes(self) -> int:
        return len(self._unsent)

    def sendall(self, data: bytes) -> None:
        """Send, or keep for later.

        Raises:
            BrokenPipeError: the connection is gone, or the client reads so slowly that too much waits.
        """
        with self._lock:
            was_waiting = bool(self._unsent)
            self._unsent += data
            if not was_waiting:
                self._send()
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise BrokenPipeError("The client does not read its response.")
            starts_waiting = bool(self._unsent) and not was_waiting
        if starts_waiting:
            self.on_unsent()

    def flush(self) -> tuple[bool, bool]:
        """Send what waits. Returns whether some was sent, and whether all was.

        Raises:
            OSError: the connection is gone.
        """
        with self._lock:
            before = len(self._unsent)
            self._send()
            return len(self._unsent) < before, not self._unsent

    def _send(self) -> None:
        while self._unsent:
            try:
                # TLS wants the same bytes again after an incomplete write, so no copy is sliced here.
                num_sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:num_sent]
