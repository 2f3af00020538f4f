"""The transport's contract with httpx 0.28: what it assumes of httpx, and that httpx's own transport behaves the same.

The client must not notice which transport it has, so behaviours are tested with both.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from gateway.pool.transport import UnixTransport
from tests.gateway.pool.helpers import END, HEAD, Answer, chunk, read_request, sends, sends_to_each, serving

OK = b"HTTP/1.1 200 OK\r\nX-Twice: 1\r\nX-Twice: 2\r\nContent-Length: 5\r\n\r\nhello"
MakeTransport = Callable[[str], httpx.BaseTransport]


def unix_transport(address: str) -> httpx.BaseTransport:
    return UnixTransport(address, keepalive_expiry_s=60.0)


def httpx_transport(address: str) -> httpx.BaseTransport:
    return httpx.HTTPTransport(uds=address, limits=httpx.Limits(max_connections=None, keepalive_expiry=60.0))


@pytest.fixture(params=[unix_transport, httpx_transport], ids=["ours", "httpx"])
def make_transport(request: pytest.FixtureRequest) -> MakeTransport:
    make: MakeTransport = request.param
    return make


def post(content: bytes = b"body", *, timeout_s: float = 1.0, headers: dict[str, str] | None = None) -> httpx.Request:
    return httpx.Request(
        "POST",
        httpx.URL("http://slot/path?a=1"),
        stream=httpx.ByteStream(content),
        headers={"Host": "slot", "Content-Length": str(len(content)), **(headers or {})},
        extensions={"timeout": {"connect": timeout_s, "write": timeout_s, "read": timeout_s, "pool": timeout_s}},
    )


def read(transport: httpx.BaseTransport, request: httpx.Request) -> bytes:
    with closing(transport.handle_request(request)) as response:
        return b"".join(response.iter_raw())


def waits(seconds: float = 5.0) -> tuple[Answer, threading.Event]:
    """An answer that sends nothing until the event is set, and the event."""
    release = threading.Event()
    return lambda _connection: release.wait(seconds), release


def test_the_tested_httpx_is_the_pinned_one() -> None:
    assert httpx.__version__.startswith("0.28.")


def test_a_request_and_its_response(short_path: Path, make_transport: MakeTransport) -> None:
    with serving(short_path, sends(OK)) as server, make_transport(server.address) as transport:
        response = transport.handle_request(post(b"some body", headers={"X-Request-Id": "r-1"}))
        assert response.status_code == 200
        assert response.headers.get_list("x-twice") == ["1", "2"]
        assert isinstance(response.stream, httpx.SyncByteStream)
        assert b"".join(response.iter_raw()) == b"hello"
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"POST /path?a=1 HTTP/1.1", b"Host: slot", b"Content-Length: 9", b"X-Request-Id: r-1",
    ]  # fmt: skip
    assert body == b"some body"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (sends(b"SSH-2.0-OpenSSH\r\n"), httpx.RemoteProtocolError),
        (sends(), httpx.RemoteProtocolError),
        (sends(HEAD), httpx.RemoteProtocolError),
        (sends(HEAD + b"xyz\r\n"), httpx.RemoteProtocolError),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello"), httpx.RemoteProtocolError),
    ],
)
def test_what_is_not_a_complete_response_is_a_protocol_error(
    short_path: Path, make_transport: MakeTransport, answer: Answer, error: type[Exception]
) -> None:
    with (
        serving(short_path, answer) as server,
        make_transport(server.address) as transport,
        pytest.raises(error) as caught,
    ):
        read(transport, post())
    assert isinstance(caught.value, httpx.TransportError)
    assert not isinstance(caught.value, httpx.TimeoutException)


# The next two without httpx's transport: it leaves a socket that could not connect to the garbage collector, whose
# warning is an error here, and reports a full backlog as a ConnectError at once.
def test_a_socket_that_is_not_there_is_a_connect_error(short_path: Path) -> None:
    with UnixTransport(str(short_path / "none.sock"), 60.0) as transport, pytest.raises(httpx.ConnectError):
        read(transport, post())
    assert issubclass(httpx.ConnectError, httpx.TransportError)
    assert not issubclass(httpx.ConnectError, httpx.TimeoutException)


def test_a_listener_that_does_not_accept_is_a_connect_timeout(short_path: Path) -> None:
    address = str(short_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(address)
        listener.listen(0)
        first.connect(address)  # fills the backlog
        with (
            UnixTransport(address, 60.0) as transport,
            pytest.raises(httpx.ConnectTimeout, match=r"timed out after 0\.1 s") as caught,
        ):
            read(transport, post(timeout_s=0.1))
    assert isinstance(caught.value, httpx.TimeoutException)
    assert isinstance(caught.value, httpx.TransportError)


def test_a_request_that_is_not_read_is_a_write_timeout(short_path: Path, make_transport: MakeTransport) -> None:
    address = str(short_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        with make_transport(address) as transport, pytest.raises(httpx.WriteTimeout) as caught:
            read(transport, post(b"x" * (8 << 20), timeout_s=0.1))
    assert isinstance(caught.value, httpx.TimeoutException)
    # The transport tries another connection after a WriteError, but not after a timeout.
    assert not isinstance(caught.value, httpx.WriteError)


def test_a_response_that_does_not_begin_is_a_read_timeout(short_path: Path, make_transport: MakeTransport) -> None:
    answer, release = waits()
    with serving(short_path, answer) as server, make_transport(server.address) as transport:
        start = time.monotonic()
        with pytest.raises(httpx.ReadTimeout) as caught:
            read(transport, post(timeout_s=0.1))
        assert 0.1 <= time.monotonic() - start < 2
        release.set()
    assert isinstance(caught.value, httpx.TimeoutException)


def test_the_read_timeout_may_be_changed_before_the_body(short_path: Path, make_transport: MakeTransport) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        time.sleep(0.4)
        connection.sendall(chunk(b"late") + END)

    with serving(short_path, answer) as server, make_transport(server.address) as transport:
        request = post(timeout_s=0.2)
        with closing(transport.handle_request(request)) as response:
            request.extensions["timeout"]["read"] = 5.0
            assert b"".join(response.iter_raw()) == b"late"


def test_shutting_down_the_network_streams_socket_wakes_a_blocked_read(
    short_path: Path, make_transport: MakeTransport
) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + chunk(b"first"))
        connection.recv(1)

    with serving(short_path, answer) as server, make_transport(server.address) as transport:
        with closing(transport.handle_request(post(timeout_s=10.0))) as response:
            sock = response.extensions["network_stream"].get_extra_info("socket")
            assert isinstance(sock, socket.socket)
            body = response.iter_raw()
            assert next(body) == b"first"
            start = time.monotonic()
            threading.Timer(0.05, sock.shutdown, (socket.SHUT_RDWR,)).start()
            with pytest.raises(httpx.TransportError) as caught:
                next(body)
        assert time.monotonic() - start < 5
    assert not isinstance(caught.value, httpx.TimeoutException)


def test_a_connection_is_reused_after_a_complete_response(short_path: Path, make_transport: MakeTransport) -> None:
    with serving(short_path, sends_to_each(OK)) as server, make_transport(server.address) as transport:
        assert [read(transport, post()) for _ in range(3)] == [b"hello"] * 3
        assert server.num_connections == 1


def test_a_response_closed_early_closes_its_connection(short_path: Path, make_transport: MakeTransport) -> None:
    data = HEAD + chunk(b"first") + chunk(b"second")
    with serving(short_path, sends_to_each(data)) as server, make_transport(server.address) as transport:
        for _ in range(2):
            with closing(transport.handle_request(post())) as response:
                assert next(response.iter_raw()).startswith(b"first")
        assert server.num_connections == 2


def test_connection_close_is_respected(short_path: Path, make_transport: MakeTransport) -> None:
    data = OK.replace(b"X-Twice: 1", b"Connection: close")
    with serving(short_path, sends_to_each(data)) as server, make_transport(server.address) as transport:
        assert [read(transport, post()) for _ in range(2)] == [b"hello"] * 2
        assert server.num_connections == 2


def test_calls_at_once_have_connections_of_their_own(short_path: Path, make_transport: MakeTransport) -> None:
    with serving(short_path, sends_to_each(OK)) as server, make_transport(server.address) as transport:
        with closing(transport.handle_request(post())) as first, closing(transport.handle_request(post())) as second:
            assert b"".join(second.iter_raw()) == b"".join(first.iter_raw()) == b"hello"
        assert server.num_connections == 2
        assert read(transport, post()) == b"hello"
        assert server.num_connections == 2


def test_idle_connections_expire(short_path: Path) -> None:
    with serving(short_path, sends_to_each(OK)) as server, UnixTransport(server.address, 0.05) as transport:
        assert read(transport, post()) == b"hello"
        time.sleep(0.1)
        assert read(transport, post()) == b"hello"
        assert server.num_connections == 2


def test_close_leaves_calls_in_progress_alone(short_path: Path) -> None:
    with serving(short_path, sends_to_each(OK)) as server:
        transport = UnixTransport(server.address, 60.0)
        assert read(transport, post()) == b"hello"
        with closing(transport.handle_request(post())) as response:
            transport.close()
            assert b"".join(response.iter_raw()) == b"hello"
        transport.close()


def test_a_header_with_a_line_break_is_refused_before_anything_is_sent(
    short_path: Path, make_transport: MakeTransport
) -> None:
    with serving(short_path, sends_to_each(OK)) as server, make_transport(server.address) as transport:
        with pytest.raises(httpx.LocalProtocolError) as caught:
            read(transport, post(headers={"X-Request-Id": "a\r\nX-Other: b"}))
        assert isinstance(caught.value, httpx.TransportError)
        assert read(transport, post()) == b"hello"
        assert b"X-Other" not in b"".join(server.requests)


class Recording(httpx.BaseTransport):
    """Answers every request with chunks, and notes what httpx does with it."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.num_closes = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(200, stream=Chunks(self), extensions={"network_stream": self})


class Chunks(httpx.SyncByteStream):
    def __init__(self, transport: Recording) -> None:
        self._transport = transport

    def __iter__(self) -> Iterator[bytes]:
        yield from (b"one\ntwo", b"\n", b"three\n")

    def close(self) -> None:
        self._transport.num_closes += 1


def test_a_client_hands_the_transport_its_timeouts_in_seconds() -> None:
    transport = Recording()
    with httpx.Client(transport=transport, base_url="http://slot", trust_env=False) as client:
        client.get("/state", timeout=httpx.Timeout(3.0))
    [request] = transport.requests
    assert request.extensions["timeout"] == {"connect": 3.0, "read": 3.0, "write": 3.0, "pool": 3.0}
    assert request.url.raw_path == b"/state"
    assert (b"Host", b"slot") in request.headers.raw


def test_the_body_is_passed_on_chunk_by_chunk_and_closed_once_at_its_end() -> None:
    transport = Recording()
    with closing(transport.handle_request(post())) as response:
        assert list(response.iter_raw()) == [b"one\ntwo", b"\n", b"three\n"]
        assert transport.num_closes == 1
    assert transport.num_closes == 1


def test_a_response_that_is_not_read_to_its_end_is_closed_with_its_block() -> None:
    transport = Recording()
    with httpx.Client(transport=transport, trust_env=False) as client:
        with client.stream("GET", "http://slot/state") as response:
            assert next(response.iter_raw()) == b"one\ntwo"
            assert transport.num_closes == 0
        assert transport.num_closes == 1


def test_extensions_reach_the_caller() -> None:
    transport = Recording()
    assert transport.handle_request(post()).extensions["network_stream"] is transport
    with httpx.Client(transport=transport, trust_env=False) as client:
        assert client.get("http://slot/").extensions["network_stream"] is transport


def test_a_request_has_its_body_and_its_headers_as_given() -> None:
    request = post(b"some body", headers={"X-Request-Id": "r-1"})
    assert request.read() == b"some body"
    assert request.headers.raw == [(b"Host", b"slot"), (b"Content-Length", b"9"), (b"X-Request-Id", b"r-1")]


def test_a_large_body_is_sent_whole_on_a_reused_connection(short_path: Path, make_transport: MakeTransport) -> None:
    sizes: list[int] = []

    def answer(connection: socket.socket) -> None:
        connection.sendall(OK)
        sizes.append(len(read_request(connection).partition(b"\r\n\r\n")[2]))
        connection.sendall(OK)

    with serving(short_path, answer) as server, make_transport(server.address) as transport:
        assert read(transport, post()) == b"hello"
        assert read(transport, post(b"x" * 500_000)) == b"hello"
    assert sizes == [500_000]
