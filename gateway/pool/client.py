"""The client of one slot: `POST /generate`, `POST /tokenize` and `GET /state` on its private socket, or on the TCP
port of a worker on another machine.

Only this module and its transport know httpx. It translates every failure of a call into `BranchError`, and does not
know what its caller does about it (retry, another slot). `shared.wire` has the headers and the bodies.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field

import httpx

from gateway.pool.access import RemoteAccess
from gateway.pool.answers import shortened, usable_state
from gateway.pool.transport import TcpAddress, Transport, UnixAddress, UntrustedPeer
from shared import wire
from shared.errors import BodyTooLarge, InvalidJson, InvalidRequest, PromptTooLong
from shared.plan import Remote, Slot
from shared.protocol import Done, Failed, GenerateRequest, State, Token, TokenizeRequest, Tokens
from shared.setting_values import Address
from shared.time_margins import MARGINS

# The worker lives, and makes its socket again if it was removed.
NO_SOCKET = "no_socket"
# Below gunicorn's keepalive (75 s), so that this side closes idle connections and never writes to a closed one.
KEEPALIVE_EXPIRY_S = 60.0
# A streamed answer has each token in a line of its own and in the last.
MAX_ANSWER_BYTES = 2 * wire.MAX_LINE_BYTES
# A MiB of text has at most a million tokens, of 30 bytes of JSON.
MAX_TOKENIZE_BYTES = 64 << 20
# How long a connection to another machine may take: the handshakes of TCP and TLS are at least two round trips.
CONNECT_S = 1.0


# Refusals of the request itself.
_FINAL_REFUSALS = frozenset({BodyTooLarge.code, InvalidJson.code, InvalidRequest.code, PromptTooLong.code})


class BranchError(Exception):
    """A call without a result.

    Attributes:
        code: one of a closed list, because it becomes a label of metrics.
        is_retryable: false if another slot would fail in the same way.
    """

    def __init__(self, code: str, detail: str, *, is_retryable: bool = True) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.is_retryable = is_retryable


@dataclass(frozen=True, slots=True)
class _Peer:
    """Where a slot's worker is reached.

    Attributes:
        urls: URLs by the paths of `wire.ROUTES`; parsed once, because that takes longer than the rest of a request.
        host: value of the header Host.
        access: key and TLS settings for a worker on another machine. None for a Unix socket.
        connect_s: the least time that a connection may take.
    """

    transport: Transport
    urls: dict[str, httpx.URL]
    host: bytes = wire.LOCAL_HOST
    access: RemoteAccess | None = None
    connect_s: float = 0.0

    def send(
        self,
        path: str,
        timeout_s: float,
        content: bytes | None = None,
        *,
        query: str = "",
        connect_s: float | None = None,
        request_id: str | None = None,
        session_id: bytes | None = None,
        hold: Callable[[socket.socket], None] | None = None,
    ) -> httpx.Response:
        """Send a request. Returns the response when its head has arrived; its stream is to be closed.

        Calls the transport without an httpx.Client: redirects, cookies and default headers are of no use here, and take
        a third of a call's CPU time.

        Args:
            path: one of `wire.ROUTES`.
            timeout_s: limit of the write, and of all reads together; `_set_read_timeout` begins another for the reads
                that follow.
            connect_s: limit of connecting; default: `timeout_s`.
            hold: as the extension of `Transport.handle_request`.

        Raises:
            httpx.TransportError: as `Transport.handle_request`.
        """
        headers = wire.request_headers(
            host=self.host,
            key="" if self.access is None else self.access.key,
            length=None if content is None else len(content),
            request_id=request_id,
            session_id=session_id,
        )
        connect_s = timeout_s if connect_s is None else connect_s
        until = time.monotonic() + timeout_s
        timeouts = {"connect": connect_s, "write": timeout_s, "read": timeout_s, "until": until}
        extensions: dict[str, object] = {"timeout": timeouts}
        if hold is not None:
            extensions["hold"] = hold
        url = self.urls[path].copy_with(query=query.encode()) if query else self.urls[path]
        stream = httpx.ByteStream(content or b"")
        request = httpx.Request(wire.ROUTES[path], url, headers=headers, stream=stream, extensions=extensions)
        response = self.transport.handle_request(request)
        response.request = request
        return response


def _stream(response: httpx.Response) -> httpx.SyncByteStream:
    """The body. Not `response.iter_raw`, which counts, splits and translates errors, none of which is of use here."""
    assert isinstance(response.stream, httpx.SyncByteStream)
    return response.stream


def _set_read_timeout(response: httpx.Response, timeout_s: float) -> None:
    response.request.extensions["timeout"] |= {"read": timeout_s, "until": time.monotonic() + timeout_s}


@dataclass(eq=False)
class _AbortableCall:
    """A call that one thread makes, and that any thread may end by `cancel` or `abort`.

    Attributes:
        running: holds this call while it is made.
    """

    peer: _Peer
    running: set[_AbortableCall]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _socket: socket.socket | None = field(default=None, init=False)
    _abort_reason: BranchError | None = field(default=None, init=False)

    def __enter__(self) -> None:
        """It is made while the block runs."""
        self.running.add(self)

    def __exit__(self, *_: object) -> None:
        self.running.discard(self)
        with self._lock:
            self._socket = None

    def cancel(self) -> None:
        """End the call now, because its result is not wanted any more."""
        self.abort(BranchError("cancelled", "Cancelled.", is_retryable=False))

    def abort(self, reason: BranchError) -> None:
        """End the call now: the thread that reads gets `reason`, and the worker sees the connection close.

        It shuts the socket down, because closing a socket does not wake a read that blocks in another thread. While
        there is no socket yet, the call ends when there is one, or when the time for that has passed. Of several
        reasons the first is kept.
        """
        with self._lock:
            self._abort_reason = self._abort_reason or reason
            if self._socket is not None:
                with suppress(OSError):
                    # Shut down the TCP connection: `SSLSocket.shutdown` would let another thread read on without TLS.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _hold_socket(self, sock: socket.socket) -> None:
        with self._lock:
            self._socket = sock
        self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        reason = self._abort_reason
        if reason is not None:
            raise BranchError(reason.code, reason.detail, is_retryable=reason.is_retryable)


@dataclass(eq=False)
class Call(_AbortableCall):
    """One `POST /generate`. One thread iterates `lines`; any thread may call `cancel` or `abort`.

    Before the worker's acknowledgement there is no socket to shut down.

    Attributes:
        ack_s: how long the worker may take to accept the request.
        deadline: `time.monotonic()` time.
        document: as for `SlotClient.call`.
    """

    request: GenerateRequest
    ack_s: float
    deadline: float
    document: int | None
    _num_tokens: int = field(default=0, init=False)

    def lines(self) -> Iterator[list[Token | Done]]:
        """The lines of the response after `accepted`, as they arrive; lines that arrive together are in one list.

        `Done` is the last. Iterate past it, to the end of the response, and the connection is reused by a later call.

        Raises:
            BranchError: unreachable, not acknowledged in time, refused, broken off, invalid, cancelled or aborted.
        """
        is_acknowledged = False
        content = wire.encode_request(self.request)
        peer = self.peer
        session_id = None if peer.access is None else peer.access.session_id(self._identity())
        try:
            with self:
                self._raise_if_aborted()
                response = peer.send(
                    "/generate",
                    self.ack_s,
                    content,
                    connect_s=max(self.ack_s, peer.connect_s),
                    request_id=self.request.request_id,
                    session_id=session_id,
                )
                with closing(_stream(response)) as stream:
                    self._hold_socket(response.extensions["network_stream"].get_extra_info("socket"))
                    if response.status_code != httpx.codes.OK:
                        raise _read_refusal(response)
                    # The worker sends the head together with `accepted`, so the head is the acknowledgement. The
                    # request's handler keeps the deadline; the timeout set here for the body frees this thread if it
                    # does not cancel.
                    is_acknowledged = True
                    _set_read_timeout(response, max(0.0, self.deadline - time.monotonic()) + MARGINS.silence_s)
                    for raw_lines in wire.split_lines(stream, max_bytes=MAX_ANSWER_BYTES):
                        if batch := self._decode(raw_lines):
                            yield batch
        except httpx.TimeoutException as error:
            if is_acknowledged:
                raise BranchError("timeout", "The worker sent nothing until the deadline.") from error
            raise BranchError(
                "not_acknowledged", f"The worker did not accept the branch within {self.ack_s:g} s."
            ) from error
        except httpx.TransportError as error:
            self._raise_if_aborted()
            raise _connection_error(error) from error
        except wire.InvalidAnswer as error:
            raise BranchError(error.code, str(error)) from error
        except wire.DECODE_ERRORS as error:
            raise BranchError("garbage", "The worker sent an invalid line.") from error

    def _decode(self, raw_lines: Iterable[bytes]) -> list[Token | Done]:
        batch: list[Token | Done] = []
        for line in map(wire.decode_line, raw_lines):
            if isinstance(line, Done):
                wire.check_done(line, self.request)
                batch.append(line)
            elif isinstance(line, Token):
                self._num_tokens += 1
                if self._num_tokens > self.request.sampling.max_new_tokens:
                    raise wire.InvalidAnswer("garbage", "The worker sent more tokens than requested.")
                batch.append(line)
            elif isinstance(line, Failed):
                raise _failure(line)
        return batch

    def _identity(self) -> bytes:
        """Equal for requests of one document, else for the branches of one prompt."""
        if self.document is not None:
            return b"%d" % self.document
        return (self.request.group.id if self.request.group else self.request.request_id).encode()


@dataclass(eq=False)
class TokenizeCall(_AbortableCall):
    """One `POST /tokenize`. One thread calls `result`; any thread may call `cancel` or `abort`."""

    text: str
    timeout_s: float

    def result(self) -> Tokens:
        """The tokens of the text, as the slot's model has them in a prompt.

        Raises:
            BranchError: unreachable or refused; these are retryable, because the worker has not begun. Broken off,
                invalid, cancelled, or not complete in time.
        """
        with self:
            self._raise_if_aborted()
            return self._read()

    def _read(self) -> Tokens:
        deadline = time.monotonic() + self.timeout_s
        content = wire.encode_request(TokenizeRequest(text=self.text))
        connect_s = min(self.timeout_s, CONNECT_S)
        try:
            response = self.peer.send("/tokenize", self.timeout_s, content, connect_s=connect_s, hold=self._hold_socket)
            with closing(_stream(response)):
                if response.status_code != httpx.codes.OK:
                    raise _read_refusal(response)
                return wire.decode_tokens(_read_all(response, deadline, MAX_TOKENIZE_BYTES))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise BranchError("unreachable", "The worker cannot be reached.") from error
        except httpx.TimeoutException as error:
            raise BranchError(
                "timeout", f"The worker did not respond within {self.timeout_s:g} s.", is_retryable=False
            ) from error
        except httpx.TransportError as error:
            reason = self._abort_reason or _connection_error(error)
            raise BranchError(reason.code, reason.detail, is_retryable=False) from error
        except (wire.InvalidAnswer, *wire.DECODE_ERRORS) as error:
            raise BranchError("garbage", "The worker sent an invalid response.", is_retryable=False) from error


class SlotClient:
    """Calls one slot's worker over its private socket, or on another machine. Thread-safe; one instance serves all
    threads."""

    def __init__(self, slot: Slot, ack_s: float, access: RemoteAccess | None = None) -> None:
        """
        Args:
            ack_s: how long the worker may take to accept a request on its first attempt.
            access: key and TLS settings for slots of other machines.
        """
        self._ack_s = ack_s
        self._peer = _local_peer(slot.socket) if slot.remote is None else _remote_peer(slot.remote, access)
        self._running: set[_AbortableCall] = set()  # calls in progress; its methods are atomic

    def close(self) -> None:
        """Close the idle connections; calls in progress continue."""
        self._peer.transport.close()

    def call(
        self,
        request: GenerateRequest,
        deadline: float,
        attempt: int = 1,
        document: int | None = None,
    ) -> Call:
        """A call that starts when its `lines` are iterated.

        Args:
            deadline: `time.monotonic()` time.
            attempt: number from 1; each one doubles the time to acknowledge. If several slots are late, the machine is
                busy, and a short limit would only discard work that has begun.
            document: equal for requests of one document; None: unknown.
        """
        ack_s = self._ack_s * 2 ** (attempt - 1)
        return Call(self._peer, self._running, request, ack_s, deadline, document)

    def tokenize(self, text: str, timeout_s: float) -> TokenizeCall:
        """A call that starts with its `result`."""
        return TokenizeCall(self._peer, self._running, text, timeout_s)

    def abort_calls(self, reason: BranchError) -> None:
        """End every call in progress with `reason`."""
        for call in self._running.copy():
            call.abort(reason)

    def states(self) -> Generator[State]:
        """The worker's states as they arrive. Ends when the worker ends the stream.

        Raises:
            BranchError: the stream ended in another way: the worker is unreachable, refused, died, was silent for
                `silence_s` of `MARGINS`, or sent an invalid line.
        """
        return self._states("", MARGINS.silence_s)

    def state(self, timeout_s: float) -> State:
        """The worker's state now. The caller does not count as a gateway that shares the worker.

        Raises:
            BranchError: as `states`.
        """
        for state in self._states(wire.ONCE, timeout_s):
            return state
        raise BranchError("broken", "The worker sent no state.")

    def _states(self, query: str, timeout_s: float) -> Generator[State]:
        try:
            response = self._peer.send("/state", timeout_s, query=query)
            with closing(_stream(response)):
                if response.status_code == httpx.codes.UNAUTHORIZED:
                    raise BranchError("refused", "The worker refused the key (TERCET_POOL_KEY).")
                if response.status_code != httpx.codes.OK:
                    raise BranchError("refused", f"The worker answered {response.status_code}.")
                yield from _read_states(response, timeout_s)
        except UntrustedPeer as error:
            raise BranchError("untrusted", str(error)) from error
        except httpx.TransportError as error:
            raise BranchError("unreachable", str(error)) from error
        except wire.InvalidAnswer as error:
            raise BranchError(error.code, str(error)) from error
        except wire.DECODE_ERRORS as error:
            raise BranchError("garbage", f"The worker sent an invalid state: {error}") from error


def _local_peer(path: str) -> _Peer:
    return _Peer(Transport(UnixAddress(path), KEEPALIVE_EXPIRY_S), _urls("http://slot"))


def _remote_peer(remote: Remote, access: RemoteAccess | None) -> _Peer:
    """
    Raises:
        ValueError: there is no access to slots of other machines.
    """
    if access is None:
        raise ValueError("A slot of another machine needs RemoteAccess.")
    tls_context = access.tls_context if remote.scheme == "https" else None
    transport = Transport(TcpAddress(remote.address, remote.port, remote.host, tls_context), KEEPALIVE_EXPIRY_S)
    urls = _urls(f"{remote.scheme}://{Address(remote.address, remote.port)}{remote.path}")
    return _Peer(transport, urls, str(Address(remote.host, remote.port)).encode(), access, CONNECT_S)


def _urls(base: str) -> dict[str, httpx.URL]:
    return {path: httpx.URL(base + path) for path in wire.ROUTES}


def _read_states(response: httpx.Response, timeout_s: float) -> Iterator[State]:
    """The states of a stream.

    Raises:
        httpx.TransportError: no line is complete within `timeout_s`, or the stream breaks off.
        wire.InvalidAnswer: a line is too long, or incomplete.
    """
    for raw_lines in wire.split_lines(_stream(response), wire.MAX_STATE_BYTES):
        if not raw_lines:
            continue
        _set_read_timeout(response, timeout_s)
        yield from map(usable_state, map(wire.decode_state, raw_lines))


def _read_all(response: httpx.Response, deadline: float, max_bytes: int) -> bytes:
    """The body.

    Raises:
        BranchError: it is longer than `max_bytes`.
        httpx.TransportError: it is not complete, a timeout at the deadline.
    """
    parts: list[bytes] = []
    num_bytes = 0
    for part in _stream(response):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise BranchError("oversize", f"The worker sent more than {max_bytes} bytes.", is_retryable=False)
        _set_read_timeout(response, max(0.0, deadline - time.monotonic()))
    return b"".join(parts)


def _connection_error(error: httpx.TransportError) -> BranchError:
    if isinstance(error.__cause__, FileNotFoundError):
        return BranchError(NO_SOCKET, "The worker's socket is missing.")
    return BranchError("broken", "The connection to the worker failed.")


def _failure(line: Failed) -> BranchError:
    """The error of a `failed` line. A code that is not listed says nothing, and would become a label of metrics."""
    return BranchError(line.code if line.code in wire.FAILURE_CODES else "failed", shortened(line.detail))


def _read_refusal(response: httpx.Response) -> BranchError:
    """The error in a response other than 200."""
    body = bytearray()
    for chunk in _stream(response):
        body += chunk
        if len(body) > wire.MAX_REFUSAL_BYTES:
            raise BranchError("oversize", "The worker sent more bytes than a refusal can have.")
    code, detail = wire.read_refusal(response.status_code, bytes(body))
    # Another worker may know the key already, or still; and what is no refusal of the request may work there.
    is_final = response.status_code < httpx.codes.INTERNAL_SERVER_ERROR and code in _FINAL_REFUSALS
    return BranchError(code, shortened(detail), is_retryable=not is_final)
