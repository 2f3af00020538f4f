"""Client connections of the gateway: reads requests and writes responses without blocking.

A thread is needed only while a request is being answered. Until a request is complete, and while its response waits for
a slow client, the connection belongs to the main thread, which polls all of them. So a client that sends a header byte
by byte, or never reads, costs a descriptor and a bounded buffer, and no thread.

This module finds where a request ends and nothing else of HTTP: `http_server` hands the complete request to gunicorn's
parser, which judges it. A body in chunks is handed over as one of a known length. Where the length of a body is in
doubt, only the head is handed over, or the request is refused, and the connection closes after the response, so the two
can never disagree about where the next request begins.
"""

from __future__ import annotations

import enum
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gateway.server.chunks import ChunkedBody, InvalidChunks
from gateway.server.tls_socket import TlsSocket
from gateway.server.work import Work

# A refused upload costs one read and what lingering discards: 64 KiB at most.
READ_BYTES = 32 << 10
# Requests of more bytes are large. The whole prompt of a model has less.
LARGE_BYTES = 64 << 10
# A request line, of which gunicorn's setting limit_request_line has the limit, and 64 KiB of fields.
MAX_HEAD_BYTES = (4 + 64) << 10
# A response that a client does not read waits in memory up to this size: eight streams of 256 tokens take 300 kB.
MAX_UNSENT_BYTES = 4 << 20
# After the last response, so that it is not lost in a reset: how much more of the request is read and discarded, and
# for how long.
LINGER_BYTES = 28 << 10
LINGER_S = 2.0

_HEAD_END = b"\r\n\r\n"
_HTTP_1_0 = re.compile(rb"[\r\n]*+[^\r\n]*HTTP/1\.0\r\n")  # the parser skips empty lines before a request
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})[ \t]*(?=\r\n)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*(?=\r\n)", re.IGNORECASE)
_FRAMING_FIELD = re.compile(rb"\n[ \t]*(content-length|transfer-encoding)", re.IGNORECASE)
_EXPECT_CONTINUE = re.compile(rb"\r\nexpect:[ \t]*100-continue[ \t]*(?=\r\n)", re.IGNORECASE)
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
    """What the main thread does next with a connection."""

    WAIT_TO_READ = enum.auto()
    WAIT_TO_WRITE = enum.auto()
    ANSWER = enum.auto()  # a request is complete
    REFUSE_HEAD = enum.auto()  # the head is too long
    REFUSE_BODY = enum.auto()  # where the body ends cannot be known: `refusal` says why
    NOTHING = enum.auto()  # a thread answers, and nothing waits to be sent
    CLOSE = enum.auto()


class Connection:
    """One client. The main thread calls everything but `ResponseSocket`'s methods."""

    def __init__(
        self,
        sock: socket.socket,
        client: Any,
        server: Any,
        *,
        now: float,
        max_body_bytes: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        """
        Args:
            client, server: the addresses, as gunicorn takes them.
            now: `time.monotonic()` time, as in all methods.
            max_body_bytes: a longer body is not read; its head is answered.
        """
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.client = client
        self.server = server
        self.phase = Phase.IDLE
        self.num_counted_bytes = 0  # of `num_buffered_bytes`, in the server's sum
        self.since = now  # when the phase began, or when the client last accepted data
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer in which no head ends
        self._head_bytes = 0  # length of the head at the start of the buffer, once all of it has arrived
        self._request_bytes = 0  # length of the head and its body
        self._chunks: ChunkedBody | None = None  # the body of the request that arrives; the buffer then has its head
        self.refusal = ""
        self._is_length_known = True
        self._num_discarded = 0
        self.work = Work.READS  # the class of the last complete request
        self.owner = ""
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
    def num_buffered_bytes(self) -> int:
        return len(self._buffer) + (0 if self._chunks is None else self._chunks.num_buffered_bytes)

    @property
    def is_receiving_large(self) -> bool:
        """Whether the head has arrived, and says that the request is large or has no length."""
        return self.phase is Phase.READING and (self._request_bytes > LARGE_BYTES or self._chunks is not None)

    @property
    def received_head(self) -> bytes:
        """The head of the next request, or what has arrived of it; bytes of the body may follow."""
        return bytes(self._buffer[:MAX_HEAD_BYTES])

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

    def take_request(self, now: float) -> bytearray:
        """The complete request; a thread answers it from now on."""
        if len(self._buffer) == self._request_bytes:
            request, self._buffer = self._buffer, bytearray()  # to copy a MB takes 0.5 ms, most of it page faults
        else:
            request = self._buffer[: self._request_bytes]
            del self._buffer[: self._request_bytes]
        self._searched = self._head_bytes = 0
        self._set_phase(Phase.ANSWERING, now)
        return request

    @property
    def is_lone_request(self) -> bool:
        """Whether no byte of another has arrived after the complete request, and the end of it is known."""
        return self._is_length_known and len(self._buffer) == self._request_bytes

    @property
    def request_head(self) -> bytes:
        """The head of the complete request."""
        return bytes(self._buffer[: self._head_bytes])

    def discard_received(self) -> None:
        """Forget a request that was refused with the end of the connection."""
        self._buffer.clear()

    def wait_for_thread(self, now: float) -> None:
        """A request is complete, and no thread is free."""
        self._set_phase(Phase.READY, now)

    @property
    def is_last_request(self) -> bool:
        """Whether the connection must close after this response, because the end of its request is unknown."""
        return not self._is_length_known

    def finish_response(self, now: float, *, keeps_connection: bool) -> Step:
        """The thread has handed over the whole response.

        Raises:
            OSError: as `advance`.
        """
        self.response.release()
        if not keeps_connection or self.is_last_request:
            self._set_phase(Phase.FLUSHING, now)
            return self._flush(now, Step.CLOSE)
        self.is_pipelining = bool(self._buffer)
        self._set_phase(Phase.READING if self._buffer else Phase.IDLE, now)
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
        self._buffer.clear()
        self._chunks = None
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
            if self._buffer:
                return self._next_request()
        try:
            data = (self._tls or self._sock).recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return Step.WAIT_TO_READ
        if not data:
            return Step.CLOSE
        if self.phase is Phase.IDLE:
            self._set_phase(Phase.READING, now)
        self._buffer += data
        return self._next_request()

    def _next_request(self) -> Step:
        """What is to be done with what has been received."""
        step = self._find_request() if self._buffer else Step.WAIT_TO_READ
        # A poll of the socket does not show an end that TLS has read.
        return Step.CLOSE if step is Step.WAIT_TO_READ and self._tls is not None and self._tls.has_ended else step

    def _find_request(self) -> Step:
        """Whether the buffer starts with a complete request."""
        if not self._head_bytes:
            step = self._find_head()
            if step is not None:
                return step
        if self._chunks is not None:
            return self._read_chunks(self._chunks)
        return Step.ANSWER if len(self._buffer) >= self._request_bytes else Step.WAIT_TO_READ

    def _find_head(self) -> Step | None:
        """Find the end of the head, and how its body is framed. None: both are known, and the body is to be read."""
        end = self._buffer.find(_HEAD_END, max(0, self._searched - len(_HEAD_END)))
        if end < 0:
            self._searched = len(self._buffer)
            return Step.REFUSE_HEAD if self._searched > MAX_HEAD_BYTES else Step.WAIT_TO_READ
        self._searched = end
        num_head_bytes = end + len(_HEAD_END)
        if num_head_bytes > MAX_HEAD_BYTES:
            return Step.REFUSE_HEAD
        head = bytes(self._buffer[:num_head_bytes])
        is_http_1_0 = _HTTP_1_0.match(head) is not None
        framing = [name.lower() for name in _FRAMING_FIELD.findall(head)]
        if b"transfer-encoding" in framing:
            if framing != [b"transfer-encoding"] or is_http_1_0 or not _CHUNKED.search(head):
                self.refusal = (
                    "Transfer-Encoding must be `chunked` alone, once, and without a Content-Length, in HTTP/1.1."
                )
                return Step.REFUSE_BODY
            self._chunks = ChunkedBody(self._max_body_bytes)
            self._request_bytes = num_head_bytes + 1  # at least: not complete
        else:
            body_bytes = _body_bytes(head, len(framing))
            self._is_length_known = body_bytes is not None and body_bytes <= self._max_body_bytes
            self._request_bytes = num_head_bytes + (body_bytes or 0) * self._is_length_known
        self._head_bytes = num_head_bytes
        # A client of HTTP/1.0 does not know an interim response (RFC 9110, § 10.1.1).
        is_waiting = len(self._buffer) == num_head_bytes < self._request_bytes and not is_http_1_0
        if is_waiting and _EXPECT_CONTINUE.search(head):
            self.response.send_interim(_CONTINUE)
        return None

    def _read_chunks(self, chunks: ChunkedBody) -> Step:
        """Move what has arrived after the head to the body. A complete body replaces its chunks in the buffer."""
        data = self._buffer[self._head_bytes :]
        del self._buffer[self._head_bytes :]
        try:
            chunks.feed(data)
        except InvalidChunks as error:
            self.refusal = str(error)
            return Step.REFUSE_BODY
        if not chunks.is_complete and not chunks.is_too_large:
            return Step.WAIT_TO_READ
        self._chunks = None
        # A length above the limit is refused by it, as one that a client sends.
        length = len(chunks.body) if chunks.is_complete else self._max_body_bytes + 1
        self._is_length_known = chunks.is_complete
        self._buffer[:] = _CHUNKED.sub(b"\r\nContent-Length: %d" % length, bytes(self._buffer))
        self._head_bytes = self._request_bytes = len(self._buffer)
        if chunks.is_complete:
            self._request_bytes += length
            self._buffer += chunks.body
            self._buffer += chunks.rest
        return Step.ANSWER

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
                data = self._sock.recv(4096)  # encrypted with TLS
                if not data:
                    return Step.CLOSE
                self._num_discarded += len(data)
        except BlockingIOError:
            return Step.WAIT_TO_READ
        return Step.NOTHING  # more is not read; the deadline closes the connection


class ResponseSocket:
    """What gunicorn writes a response to. Never blocks: what the client does not take at once waits in memory.

    A thread calls `sendall` while it answers; the main thread calls `flush` when the socket is writable again.
    """

    def __init__(self, sock: socket.socket | TlsSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._is_holding = False
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
            was_waiting = bool(self._unsent) and not self._is_holding
            self._unsent += data
            # The head leaves together with the first bytes of the body.
            self._is_holding = data.startswith(b"HTTP/1.") and not was_waiting
            if self._is_holding:
                return
            if not was_waiting:
                self._send()
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise BrokenPipeError("The client does not read its response.")
            starts_waiting = bool(self._unsent) and not was_waiting
        if starts_waiting:
            self.on_unsent()

    def send(self, data: bytes) -> int:
        """Interim responses of gunicorn; `Connection` has sent its own."""
        return len(data)

    def send_interim(self, data: bytes) -> None:
        with self._lock:
            self._unsent += data
            self._send()

    def release(self) -> None:
        """The response is complete: a head without a body leaves too."""
        with self._lock:
            self._is_holding = False
            self._send()

    def flush(self) -> tuple[bool, bool]:
        """Send what waits. Returns whether some was sent, and whether all was.

        Raises:
            OSError: the connection is gone.
        """
        with self._lock:
            if self._is_holding:
                return False, True
            before = len(self._unsent)
            self._send()
            return len(self._unsent) < before, not self._unsent

    def setblocking(self, _flag: bool) -> None:
        """gunicorn's; this socket never blocks."""

    def _send(self) -> None:
        while self._unsent:
            try:
                # TLS wants the same bytes again after an incomplete write, so no copy is sliced here.
                num_sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:num_sent]


class RequestSource:
    """A complete request, as gunicorn's parser reads it: never blocks, and ends where the request ends."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = memoryview(data)

    def recv(self, size: int) -> bytes:
        data, self._data = self._data[:size], self._data[size:]
        return bytes(data)


def _body_bytes(head: bytes, num_lengths: int) -> int | None:
    """Length of the body after this head, which has `num_lengths` fields that say it. None: it is in doubt:
    there are several, or it is not a plain number."""
    if num_lengths == 0:
        return 0
    match = _CONTENT_LENGTH.search(head)
    return int(match[1]) if match is not None and num_lengths == 1 else None
