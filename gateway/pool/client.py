"""HTTP client of one slot: `POST /generate`, `POST /tokenize` and `GET /state` on its private socket, or on the TCP
port of a worker on another machine.

Only this module and its transports know httpx. It translates every failure of a call into `BranchError`, and does not
know what its caller does about it (retry, another slot).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

import httpx
import msgspec

from gateway.pool.access import RemoteAccess
from gateway.pool.transport import UnixTransport
from gateway.pool.transport_stock import TransportStock, UntrustedPeer
from shared.plan import Remote, Slot
from shared.protocol import (
    Accepted,
    Done,
    Failed,
    GenerateLine,
    GenerateRequest,
    State,
    Token,
    TokenizeRequest,
    TokenizeResponse,
)
from shared.settings import Address

# Below gunicorn's keepalive (75 s), so that this side closes idle connections and never writes to a closed one.
KEEPALIVE_EXPIRY_S = 60.0
# A worker sends its state at least once a second; after this time without a line it counts as down.
STATE_SILENCE_S = 3.0
# The largest line is a `Done` with 20 most likely tokens at each of 1,024 positions of prompt and text. Such a token is
# about 35 bytes of JSON (measured: 0.7 MB in all), at most 300 with a text of 128 bytes, GPT-2's longest, all of it
# escaped: 6 MB. A longer line is garbage.
MAX_LINE_BYTES = 8 << 20
# A MiB of text has at most a million tokens, of 30 bytes of JSON.
MAX_TOKENIZE_BYTES = 64 << 20

_decode_line = msgspec.json.Decoder(GenerateLine).decode
_decode_state = msgspec.json.Decoder(State).decode
_decode_tokens = msgspec.json.Decoder(TokenizeResponse).decode
_encode = msgspec.json.Encoder().encode
# How long a connection to another machine may take: the handshakes of TCP and TLS are at least two round trips.
CONNECT_S = 1.0


class BranchError(Exception):
    """A call without a result. `is_retryable` is false if another slot would fail in the same way."""

    def __init__(self, code: str, detail: str, *, is_retryable: bool = True) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.is_retryable = is_retryable


@dataclass(frozen=True, slots=True)
class _Peer:
    """Where a slot's worker is reached.

    Attributes:
        host: of the header.
        access: to another machine; None: a Unix socket.
        connect_s: the least time that a connection may take.
    """

    transport: httpx.BaseTransport
    base_url: httpx.URL
    generate_url: httpx.URL
    host: bytes
    access: RemoteAccess | None = None
    connect_s: float = 0.0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of each request."""
        headers = [(b"Host", self.host)]
        if self.access is not None and (key := self.access.key):
            headers.append((b"Authorization", b"Bearer " + key.encode()))
        return headers


class Call:
    """One `POST /generate`. One thread iterates `lines`; any thread may call `cancel` or `abort`."""

    def __init__(
        self,
        peer: _Peer,
        running: _RunningCalls,
        request: GenerateRequest,
        ack_s: float,
        deadline: float,
        document: int | None,
    ) -> None:
        """
        Args:
            running: holds this call while its lines are read.
            ack_s: how long the worker may take to accept the request.
            deadline: on the clock of `time.monotonic()`.
            document: as for `SlotClient.call`.
        """
        self._peer = peer
        self._document = document
        self._running = running
        self._request = request
        self._ack_s = ack_s
        self._deadline = deadline
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._abort_reason: BranchError | None = None

    def lines(self) -> Iterator[list[Token | Done]]:
        """The lines of the response after `accepted`, as they arrive; lines that arrive together are in one list.

        `Done` is the last. Iterate past it, to the end of the response, and the connection is reused by a later call.

        Raises:
            BranchError: unreachable, not acknowledged in time, refused, broken off, invalid, cancelled or aborted.
        """
        self._running.add(self)
        try:
            self._raise_if_aborted()
            yield from self._read()
        finally:
            self._running.discard(self)

    def _read(self) -> Iterator[list[Token | Done]]:
        is_acknowledged = False
        content = _encode(self._request)
        # Calls the transport without an httpx.Client: redirects, cookies and default headers are of no use here, and
        # take a third of a call's CPU time.
        peer = self._peer
        headers = [
            *peer.headers(),
            (b"Content-Length", b"%d" % len(content)),
            (b"X-Request-Id", self._request.request_id.encode()),
        ]
        if peer.access is not None:
            headers.append((b"X-Session-Id", peer.access.session_id(self._identity())))
        connect_s = max(self._ack_s, peer.connect_s)
        request = httpx.Request(
            "POST",
            peer.generate_url,
            stream=httpx.ByteStream(content),
            headers=headers,
            extensions={"timeout": {"connect": connect_s, "write": self._ack_s, "read": self._ack_s}},
        )
        try:
            response = peer.transport.handle_request(request)
            stream = response.stream
            assert isinstance(stream, httpx.SyncByteStream)
            # Not `response.iter_raw`, which counts, splits and translates errors, none of which is of use here.
            with closing(stream):
                self._hold_socket(response)
                if response.status_code != httpx.codes.OK:
                    raise _read_refusal(response)
                # The worker sends the head together with `accepted`, so the head is the acknowledgement. The request's
                # handler keeps the deadline; the timeout set here for the body frees this thread if it does not cancel.
                is_acknowledged = True
                left_s = max(0.0, self._deadline - time.monotonic())
                request.extensions["timeout"]["read"] = left_s + STATE_SILENCE_S
                for raw_lines in _split_lines(stream):
                    batch: list[Token | Done] = []
                    for line in map(_decode_line, raw_lines):
                        if isinstance(line, Failed):
                            raise BranchError(line.code, line.detail)
                        if not isinstance(line, Accepted):
                            batch.append(line)
                    if batch:
                        yield batch
        except httpx.TimeoutException as error:
            if is_acknowledged:
                raise BranchError("timeout", "The worker sent nothing until the deadline.") from error
            raise BranchError(
                "not_acknowledged", f"The worker did not accept the branch within {self._ack_s:g} s."
            ) from error
        except httpx.TransportError as error:
            self._raise_if_aborted()
            raise BranchError("broken", "The connection to the worker failed.") from error
        except msgspec.MsgspecError as error:
            raise BranchError("garbage", "The worker sent an invalid line.") from error
        finally:
            with self._lock:
                self._socket = None

    def cancel(self) -> None:
        """End the call now, because its result is not wanted any more."""
        self.abort(BranchError("cancelled", "Cancelled.", is_retryable=False))

    def abort(self, reason: BranchError) -> None:
        """End the call now: the thread that reads gets `reason`, and the worker sees the connection close.

        It shuts the socket down, because closing an httpx client or response does not wake a read that blocks in
        another thread. Before the worker's acknowledgement there is no socket yet; the call then ends with it, or when
        the time to acknowledge has passed. Of several reasons the first is kept.
        """
        with self._lock:
            self._abort_reason = self._abort_reason or reason
            if self._socket is not None:
                with suppress(OSError):
                    # Of the TCP connection: `SSLSocket.shutdown` would let a read in another thread go on without TLS.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _identity(self) -> bytes:
        """Equal for requests of one document, else for the branches of one prompt."""
        if self._document is not None:
            return b"%d" % self._document
        return (self._request.group.id if self._request.group else self._request.request_id).encode()

    def _hold_socket(self, response: httpx.Response) -> None:
        with self._lock:
            self._socket = response.extensions["network_stream"].get_extra_info("socket")
        self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        reason = self._abort_reason
        if reason is not None:
            raise BranchError(reason.code, reason.detail, is_retryable=reason.is_retryable)


class _RunningCalls:
    """The calls whose lines are being read. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[Call] = set()

    def add(self, call: Call) -> None:
        with self._lock:
            self._calls.add(call)

    def discard(self, call: Call) -> None:
        with self._lock:
            self._calls.discard(call)

    def copy(self) -> set[Call]:
        with self._lock:
            return set(self._calls)


class SlotClient:
    """Calls one slot's worker over its private socket, or on another machine. Thread-safe; one instance serves all
    threads.

    Attributes:
        is_remote: other gateways may use the slot too.
    """

    def __init__(self, slot: Slot, ack_s: float, access: RemoteAccess | None = None) -> None:
        """
        Args:
            ack_s: how long the worker may take to accept a request on its first attempt.
            access: to slots of other machines.
        """
        self._ack_s = ack_s
        self.is_remote = slot.remote is not None
        self._peer = _local_peer(slot.socket) if slot.remote is None else _remote_peer(slot.remote, access)
        self._running = _RunningCalls()
        self._client = httpx.Client(transport=self._peer.transport, base_url=self._peer.base_url, trust_env=False)

    def close(self) -> None:
        """Close the idle connections; calls in progress continue."""
        self._client.close()

    def call(self, request: GenerateRequest, deadline: float, attempt: int = 1, document: int | None = None) -> Call:
        """A call that starts when its `lines` are iterated.

        Args:
            deadline: on the clock of `time.monotonic()`.
            attempt: from 1; each one doubles the time to acknowledge. If several slots are late, the machine is busy,
                and a short limit would only discard work that has begun.
            document: equal for requests of one document; None: unknown.
        """
        return Call(self._peer, self._running, request, self._ack_s * 2 ** (attempt - 1), deadline, document)

    def tokenize(self, text: str, timeout_s: float) -> TokenizeResponse:
        """The tokens of `text`, as the slot's model has them in a prompt.

        Raises:
            BranchError: unreachable, refused, broken off, invalid, or not complete after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        content = _encode(TokenizeRequest(text=text))
        try:
            with self._client.stream(
                "POST", "tokenize", content=content, headers=self._peer.headers(), timeout=timeout_s
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise _read_refusal(response)
                return _decode_tokens(_read_all(response, deadline))
        except httpx.TimeoutException as error:
            raise BranchError("timeout", f"The worker did not respond within {timeout_s:g} s.") from error
        except httpx.TransportError as error:
            raise BranchError("broken", "The connection to the worker failed.") from error
        except msgspec.MsgspecError as error:
            raise BranchError("garbage", "The worker sent an invalid response.") from error

    def abort_calls(self, reason: BranchError) -> None:
        """End every call in progress with `reason`."""
        for call in self._running.copy():
            call.abort(reason)

    def states(self) -> Generator[State]:
        """The worker's states as they arrive. Ends when the worker ends the stream.

        Raises:
            BranchError: the stream ended in another way: the worker is unreachable, refused, died, was silent for
                `STATE_SILENCE_S`, or sent an invalid line.
        """
        try:
            with self._client.stream(
                "GET", "state", headers=self._peer.headers(), timeout=httpx.Timeout(STATE_SILENCE_S)
            ) as response:
                if response.status_code == httpx.codes.UNAUTHORIZED:
                    raise BranchError("refused", "The worker refused the key (TERCET_POOL_KEY).")
                if response.status_code != httpx.codes.OK:
                    raise BranchError("refused", f"The worker answered {response.status_code}.")
                for raw_lines in _split_lines(response.iter_raw()):
                    yield from map(_decode_state, raw_lines)
        except UntrustedPeer as error:
            raise BranchError("untrusted", str(error)) from error
        except httpx.TransportError as error:
            raise BranchError("unreachable", str(error) or type(error).__name__) from error
        except msgspec.MsgspecError as error:
            raise BranchError("garbage", str(error)) from error


def _local_peer(path: str) -> _Peer:
    base_url = httpx.URL("http://slot/")
    return _Peer(UnixTransport(path, KEEPALIVE_EXPIRY_S), base_url, base_url.join("generate"), b"slot")


def _remote_peer(remote: Remote, access: RemoteAccess | None) -> _Peer:
    """
    Raises:
        ValueError: there is no access to slots of other machines.
    """
    if access is None:
        raise ValueError("A slot of another machine needs RemoteAccess.")
    tls_context = access.tls_context if remote.scheme == "https" else None
    transport = TransportStock(remote.host, KEEPALIVE_EXPIRY_S, tls_context)
    base_url = httpx.URL(f"{remote.scheme}://{Address(remote.address, remote.port)}{remote.path}/")
    host = str(Address(remote.host, remote.port)).encode()
    return _Peer(transport, base_url, base_url.join("generate"), host, access, CONNECT_S)


def _read_all(response: httpx.Response, deadline: float) -> bytes:
    """The body.

    Raises:
        BranchError: it is longer than `MAX_TOKENIZE_BYTES`.
        httpx.TransportError: as `UnixTransport.handle_request`; a timeout if it is not complete at the deadline.
    """
    parts: list[bytes] = []
    num_bytes = 0
    for part in response.iter_raw():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > MAX_TOKENIZE_BYTES:
            raise BranchError("oversize", f"The worker sent more than {MAX_TOKENIZE_BYTES} bytes.")
        if time.monotonic() > deadline:  # httpx's own transport reads the timeout once
            raise httpx.ReadTimeout("The response is not complete at the deadline.")
        response.request.extensions["timeout"]["read"] = deadline - time.monotonic()
    return b"".join(parts)


def _split_lines(chunks: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Splits a byte stream into lines without their ends; the lines completed by one chunk are in one list.

    Raises:
        BranchError: a line is longer than `MAX_LINE_BYTES`, or the stream ends within a line.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield lines
        if len(rest) > MAX_LINE_BYTES:
            raise BranchError("oversize", f"The worker sent a line of more than {MAX_LINE_BYTES} bytes.")
    if rest:
        raise BranchError("broken", "The worker's response ended within a line.")


def _read_refusal(response: httpx.Response) -> BranchError:
    """The error in a response other than 200: the worker's own code and detail if its body is a problem document."""
    body = b""
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > MAX_LINE_BYTES:
            break
    # Another worker may know the key already, or still.
    is_key_refused = response.status_code == httpx.codes.UNAUTHORIZED
    is_retryable = is_key_refused or response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
    try:
        problem = msgspec.json.decode(body, type=dict[str, object])
    except msgspec.MsgspecError:
        problem = {}
    code = str(problem.get("code", "refused"))
    detail = str(problem.get("detail", f"The worker answered {response.status_code}."))
    return BranchError(code, detail, is_retryable=is_retryable)
