"""The gateway's HTTP client: one slot's `POST /generate` and `GET /state`. It and its transport alone know httpx.

It says what went wrong with one call (`BranchError`); what to do about it is `gateway.fanout`'s decision.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import httpx
import msgspec

from gateway.pool.transport import UnixTransport
from shared.plan import Slot
from shared.protocol import Accepted, Done, Failed, GenerateLine, GenerateRequest, State, Token

# Below gunicorn's keepalive (75 s), so that it is the client that closes an idle connection.
KEEPALIVE_EXPIRY_S = 60.0
# A worker says a line of state at least once a second; one that is silent for so long is down.
STATE_SILENCE_S = 3.0
# A completion of 256 tokens with log-probabilities is 20 kB; a line of a megabyte is no answer.
MAX_LINE_BYTES = 1 << 20

_decode_line = msgspec.json.Decoder(GenerateLine).decode
_decode_state = msgspec.json.Decoder(State).decode
_encode = msgspec.json.Encoder().encode
_GENERATE = httpx.URL("http://slot/generate")


class BranchError(Exception):
    """A call that brought nothing. `is_retryable` is false where another slot would answer the same."""

    def __init__(self, code: str, detail: str, *, is_retryable: bool = True) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.is_retryable = is_retryable


class Call:
    """One `POST /generate`. `run` is for one thread; `cancel` for any."""

    def __init__(self, transport: httpx.BaseTransport, request: GenerateRequest, ack_s: float, deadline: float) -> None:
        self._transport = transport
        self._request = request
        self._ack_s = ack_s
        self._deadline = deadline
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_cancelled = False

    def lines(self) -> Iterator[list[Token | Done]]:
        """What the worker says after `accepted`, as it comes, lines that come together together; `Done` is the last.

        Read to its end, past `Done`, it leaves a connection that serves the next call.

        Raises:
            BranchError: unreachable, not acknowledged in time, refused, broken off, or not understood.
        """
        if self._is_cancelled:
            raise BranchError("cancelled", "Cancelled.", is_retryable=False)
        is_acknowledged = False
        # Straight to the transport: redirects, cookies and default headers are no use here, and take a third of a
        # call's time in this process.
        content = _encode(self._request)
        request = httpx.Request(
            "POST",
            _GENERATE,
            stream=httpx.ByteStream(content),
            headers={"Host": "slot", "Content-Length": str(len(content)), "X-Request-Id": self._request.request_id},
            extensions={"timeout": {"connect": self._ack_s, "write": self._ack_s, "read": self._ack_s}},
        )
        try:
            response = self._transport.handle_request(request)
            with closing(response):
                self._hold_socket(response)
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response)
                # The headers come with the line `accepted`. The transport looks the read timeout up anew for the body.
                # The waiting handler keeps the deadline itself; this one frees the thread should nobody cancel.
                is_acknowledged = True
                left_s = max(0.0, self._deadline - time.monotonic())
                request.extensions["timeout"]["read"] = left_s + STATE_SILENCE_S
                for raws in _split_lines(response.iter_raw()):
                    told: list[Token | Done] = []
                    for line in map(_decode_line, raws):
                        if isinstance(line, Failed):
                            raise BranchError(line.code, line.detail)
                        if not isinstance(line, Accepted):
                            told.append(line)
                    if told:
                        yield told
        except httpx.TimeoutException as error:
            if is_acknowledged:
                raise BranchError("timeout", "The worker fell silent.") from error
            raise BranchError("not_acknowledged", "The worker did not take the branch in time.") from error
        except httpx.TransportError as error:
            code, detail = ("cancelled", "Cancelled.") if self._is_cancelled else ("broken", f"The call broke: {error}")
            raise BranchError(code, detail) from error
        except msgspec.MsgspecError as error:
            raise BranchError("garbage", f"The worker's answer was not understood: {error}") from error
        finally:
            with self._lock:
                self._socket = None

    def cancel(self) -> None:
        """End the call now: the thread that reads gets an end of stream, and the worker sees a hang-up.

        Closing an httpx client or response from another thread does not wake a blocked read; shutting down its
        socket does.
        """
        with self._lock:
            self._is_cancelled = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _hold_socket(self, response: httpx.Response) -> None:
        with self._lock:
            self._socket = response.extensions["network_stream"].get_extra_info("socket")
            is_cancelled = self._is_cancelled
        if is_cancelled:
            raise BranchError("cancelled", "Cancelled.", is_retryable=False)


class SlotClient:
    """Calls one slot's worker over its private socket; shared by all threads."""

    def __init__(self, slot: Slot, ack_s: float) -> None:
        self._ack_s = ack_s
        self._transport = UnixTransport(slot.socket, KEEPALIVE_EXPIRY_S)
        self._client = httpx.Client(transport=self._transport, base_url="http://slot", trust_env=False)

    def close(self) -> None:
        """Close idle connections; calls under way are not ended by it."""
        self._client.close()

    def call(self, request: GenerateRequest, deadline: float, attempt: int = 1) -> Call:
        """A call that is not begun yet.

        Args:
            deadline: of `time.monotonic()`.
            attempt: each later one waits twice as long to be acknowledged: where every slot is late, the machine is
                busy, and to hurry would only lose the work.
        """
        return Call(self._transport, request, self._ack_s * 2 ** (attempt - 1), deadline)

    def states(self) -> Iterator[State]:
        """The worker's state, line by line, until it ends the stream, dies or falls silent.

        Raises:
            BranchError: why the stream ended, unless the worker ended it.
        """
        try:
            with self._client.stream("GET", "/state", timeout=httpx.Timeout(STATE_SILENCE_S)) as response:
                if response.status_code != httpx.codes.OK:
                    raise BranchError("refused", f"The worker answered {response.status_code}.")
                for raws in _split_lines(response.iter_raw()):
                    yield from map(_decode_state, raws)
        except httpx.TransportError as error:
            raise BranchError("unreachable", str(error) or type(error).__name__) from error
        except msgspec.MsgspecError as error:
            raise BranchError("garbage", str(error)) from error


def _split_lines(chunks: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Lines of a byte stream, without their ends; those that end in one chunk together.

    Raises:
        BranchError: a line is longer than `MAX_LINE_BYTES`, or the last one is not ended.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield lines
        if len(rest) > MAX_LINE_BYTES:
            raise BranchError("oversize", f"The worker sent a line of more than {MAX_LINE_BYTES} bytes.")
    if rest:
        raise BranchError("broken", "The worker's answer was cut off.")


def _refusal(response: httpx.Response) -> BranchError:
    """A worker's refusal, in its own words where they can be read."""
    body = b""
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > MAX_LINE_BYTES:
            break
    is_retryable = response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
    try:
        problem = msgspec.json.decode(body, type=dict[str, object])
    except msgspec.MsgspecError:
        problem = {}
    code = str(problem.get("code", "refused"))
    detail = str(problem.get("detail", f"The worker answered {response.status_code}."))
    return BranchError(code, detail, is_retryable=is_retryable)
