"""The transport over real sockets, by every way to connect: reuse, retries, timeouts, cancelling, certificates."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from gateway.pool.transport import TcpAddress, Transport, UnixAddress, UntrustedPeer
from tests.e2e.harness import until
from tests.gateway.generation.stubs import read_request
from tests.gateway.pool.helpers import (
    HEAD,
    Answer,
    Server,
    chunk,
    sends,
    sends_to_each,
    serving,
    serving_tcp,
)
from tests.tls import Certificate

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
NAME = "localhost"
BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError)  # an error that is not a timeout
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("tls"))


# Makes a server with an answer, and a transport to it.
Serve = Callable[..., AbstractContextManager[tuple[Transport, Server]]]


def tcp_address(address: str, client: ssl.SSLContext | None = None, host: str = NAME) -> TcpAddress:
    return TcpAddress("127.0.0.1", int(address.rpartition(":")[2]), host, None if client is None else lambda: client)


def make_serve(way: str, certificate: Certificate, folder: Path) -> Serve:
    tls, client = (certificate.server(), certificate.client()) if way == "tls" else (None, None)

    @contextmanager
    def serve(answer: Answer, keepalive_expiry_s: float = 60.0) -> Iterator[tuple[Transport, Server]]:
        with serving(folder, answer) if way == "unix" else serving_tcp(answer, tls) as server:
            address = UnixAddress(server.address) if way == "unix" else tcp_address(server.address, client)
            with closing(Transport(address, keepalive_expiry_s)) as transport:
                yield transport, server

    return serve


@pytest.fixture(params=["unix", "tcp", "tls"])
def serve(request: pytest.FixtureRequest, certificate: Certificate, short_path: Path) -> Serve:
    return make_serve(request.param, certificate, short_path)


@pytest.fixture(params=["tcp", "tls"])
def serve_remotely(request: pytest.FixtureRequest, certificate: Certificate, short_path: Path) -> Serve:
    return make_serve(request.param, certificate, short_path)


def send(
    transport: Transport, content: bytes = b"body", *, timeout_s: float = 2.0, headers: tuple[tuple[str, str], ...] = ()
) -> httpx.Response:
    request = httpx.Request(
        "POST",
        "http://slot/path",
        headers=[("Host", "slot"), ("Content-Length", str(len(content))), *headers],
        stream=httpx.ByteStream(content),
        extensions={"timeout": dict.fromkeys(("connect", "write", "read"), timeout_s)},
    )
    response = transport.handle_request(request)
    response.request = request
    return response


def body(response: httpx.Response) -> httpx.SyncByteStream:
    assert isinstance(response.stream, httpx.SyncByteStream)
    return response.stream


def read(transport: Transport, content: bytes = b"body", *, timeout_s: float = 2.0) -> bytes:
    with closing(send(transport, content, timeout_s=timeout_s)) as response:
        return b"".join(body(response))


def wait_until_closed(server: Server, num_connections: int) -> None:
    until(lambda: server.num_closed == num_connections, 5, f"{num_connections} connections closed")


def test_a_request_and_its_response(serve: Serve) -> None:
    with serve(sends(OK.replace(b"200 OK", b"503 X"))) as (transport, server):
        with closing(send(transport, b"some body")) as response:
            assert response.status_code == 503
            assert b"".join(body(response)) == b"hello"
        assert server.requests == [b"POST /path HTTP/1.1\r\nHost: slot\r\nContent-Length: 9\r\n\r\nsome body"]


def test_a_header_cannot_contain_another(serve: Serve) -> None:
    with serve(sends(OK)) as (transport, server):
        with pytest.raises(httpx.LocalProtocolError, match="line break"):
            send(transport, headers=(("X-Request-Id", "a\r\nX-Other: b"),))
        assert server.num_connections == 0


def test_a_socket_that_is_not_there_is_an_error(short_path: Path) -> None:
    transport = Transport(UnixAddress(str(short_path / "none.sock")), 60.0)
    with pytest.raises(httpx.ConnectError, match=r"^No such file or directory$"):
        read(transport)


def test_a_refused_connection_says_so(serve_remotely: Serve) -> None:
    with serve_remotely(sends(OK)) as (transport, _server):
        pass
    with pytest.raises(httpx.ConnectError, match=r"^Connection refused$"):
        read(transport)


@pytest.mark.parametrize("way", ["unix", "tls"])
def test_a_peer_that_does_not_accept_or_shake_hands_is_a_timeout(
    certificate: Certificate, short_path: Path, way: str
) -> None:
    path, client = str(short_path / "full.sock"), certificate.client()
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as first,
        socket.create_server(("127.0.0.1", 0)) as tcp_listener,
    ):
        listener.bind(path)
        listener.listen(0)
        first.connect(path)  # fills the backlog
        tcp = TcpAddress("127.0.0.1", tcp_listener.getsockname()[1], NAME, lambda: client)
        with pytest.raises(httpx.TimeoutException, match=r"Connect timed out after 0\.1 s"):
            read(Transport(UnixAddress(path) if way == "unix" else tcp, 60.0), timeout_s=0.1)


def test_a_request_that_is_not_read_is_a_timeout(serve: Serve) -> None:
    release = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(OK)
        release.wait(10)

    with serve(answer) as (transport, server):
        assert read(transport) == b"hello"
        with pytest.raises(httpx.TimeoutException, match="Write timed out"):
            read(transport, b"x" * (32 << 20), timeout_s=0.2)
        release.set()
        assert server.num_connections == 1  # tried on no other connection


def test_a_response_that_does_not_begin_is_a_timeout_and_the_request_is_not_retried(serve: Serve) -> None:
    release = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(OK)
        read_request(connection)
        release.wait(5)

    with serve(answer) as (transport, server):
        assert read(transport) == b"hello"
        start = time.monotonic()
        with pytest.raises(httpx.TimeoutException, match=r"Read timed out after 0\.1 s"):
            read(transport, timeout_s=0.1)
        assert 0.1 <= time.monotonic() - start < 2
        release.set()
        assert server.num_connections == 1


def test_shutting_the_socket_down_wakes_a_blocked_read(serve: Serve) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + chunk(b"first"))
        connection.recv(1)

    with serve(answer) as (transport, server):
        with closing(send(transport, timeout_s=10.0)) as response:
            chunks = iter(body(response))
            assert next(chunks) == b"first"
            start = time.monotonic()
            connected = response.extensions["network_stream"].get_extra_info("socket")
            threading.Timer(0.05, socket.socket.shutdown, (connected, socket.SHUT_RDWR)).start()
            with pytest.raises(httpx.TransportError) as caught:
                next(chunks)
        assert time.monotonic() - start < 5
        assert not isinstance(caught.value, httpx.TimeoutException)
        wait_until_closed(server, 1)


def test_a_connection_is_reused_after_a_complete_response(serve: Serve) -> None:
    with serve(sends_to_each(OK)) as (transport, server):
        assert [read(transport) for _ in range(3)] == [b"hello"] * 3
        assert server.num_connections == 1


def test_a_response_closed_early_closes_its_connection(serve: Serve) -> None:
    with serve(sends_to_each(HEAD + chunk(b"first") + chunk(b"second"))) as (transport, server):
        for _ in range(2):
            with closing(send(transport)) as response:
                assert next(iter(body(response))).startswith(b"first")
        wait_until_closed(server, 2)


def test_connection_close_is_respected(serve: Serve) -> None:
    with serve(sends_to_each(OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"))) as (transport, server):
        assert [read(transport) for _ in range(2)] == [b"hello"] * 2
        assert server.num_connections == 2


def test_calls_at_once_have_connections_of_their_own_which_are_kept(serve: Serve) -> None:
    with serve(sends_to_each(OK)) as (transport, server):
        with closing(send(transport)) as first, closing(send(transport)) as second:
            assert b"".join(body(second)) == b"".join(body(first)) == b"hello"
        with closing(send(transport)), closing(send(transport)):
            pass
        assert server.num_connections == 2


def test_many_threads_share_a_transport(serve: Serve) -> None:
    with serve(sends_to_each(OK)) as (transport, server), ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: read(transport), range(200))) == {b"hello"}
        assert server.num_connections <= 8


def test_idle_connections_expire(serve: Serve) -> None:
    with serve(sends_to_each(OK), keepalive_expiry_s=0.05) as (transport, server):
        assert read(transport) == b"hello"
        time.sleep(0.1)
        assert read(transport) == b"hello"
        assert server.num_connections == 2


def test_a_kept_connection_that_the_peer_closed_while_idle_is_replaced(serve: Serve) -> None:
    with serve(sends(OK)) as (transport, server):  # closes after each answer, without saying so
        for number in range(1, 4):
            assert read(transport) == b"hello"
            wait_until_closed(server, number)


def close_when_the_second_request_arrives(connection: socket.socket) -> None:
    connection.sendall(OK)
    read_request(connection)  # and close, without a byte in answer


def test_a_kept_connection_that_the_peer_closes_when_the_request_arrives_is_retried_once(serve_remotely: Serve) -> None:
    with serve_remotely(close_when_the_second_request_arrives) as (transport, server):
        assert read(transport) == b"hello"
        assert read(transport) == b"hello"
        assert server.num_connections == 2


def test_over_a_unix_socket_a_peer_that_closes_when_the_request_arrives_is_an_error(
    certificate: Certificate, short_path: Path
) -> None:
    """It was there: it has died with the request, and a connection to its socket would wait for its successor."""
    serve = make_serve("unix", certificate, short_path)
    with serve(close_when_the_second_request_arrives) as (transport, server):
        assert read(transport) == b"hello"
        with pytest.raises(BROKEN, match="closed the connection"):
            read(transport)
        assert server.num_connections == 1


def test_a_response_that_breaks_off_on_a_kept_connection_is_not_retried(serve: Serve) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(OK)
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200")

    with serve(answer) as (transport, server):
        assert read(transport) == b"hello"
        with pytest.raises(BROKEN):
            read(transport)
        assert server.num_connections == 1


def test_a_large_body_is_sent_whole_on_a_reused_connection(serve: Serve) -> None:
    sizes: list[int] = []

    def answer(connection: socket.socket) -> None:
        connection.sendall(OK)
        sizes.append(len(read_request(connection).partition(b"\r\n\r\n")[2]))
        connection.sendall(OK)

    with serve(answer) as (transport, _server):
        assert read(transport) == b"hello"
        assert read(transport, b"x" * 500_000) == b"hello"
    assert sizes == [500_000]


def test_close_leaves_calls_in_progress_alone_and_closes_their_connections_later(serve: Serve) -> None:
    with serve(sends_to_each(OK)) as (transport, server):
        with closing(send(transport)) as response:
            transport.close()
            assert b"".join(body(response)) == b"hello"
        wait_until_closed(server, 1)


@pytest.mark.parametrize(
    ("host", "expiry", "text"),
    [
        ("other.example", None, "for another name"),
        (NAME, LONG_AGO, "has expired"),
        (NAME, None, "not trusted .*TERCET_POOL_CA"),
    ],
    ids=["name", "expired", "authority"],
)
def test_a_peer_that_cannot_be_trusted_is_named_clearly(
    certificate: Certificate, tmp_path: Path, host: str, expiry: datetime | None, text: str
) -> None:
    own = Certificate(tmp_path)
    own.renew(expiry)
    client = (certificate if text.startswith("not trusted") else own).client()
    with (
        serving_tcp(sends(OK), own.server()) as server,
        closing(Transport(tcp_address(server.address, client, host), 60.0)) as transport,
        pytest.raises(UntrustedPeer, match=text),
    ):
        read(transport, timeout_s=1.0)


def test_a_peer_without_tls_is_named_clearly(certificate: Certificate) -> None:
    def answer_hello(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        threads.submit(answer_hello, listener)
        address = tcp_address(f"127.0.0.1:{listener.getsockname()[1]}", certificate.client())
        with closing(Transport(address, 60.0)) as transport, pytest.raises(UntrustedPeer, match="does not speak TLS"):
            read(transport)


def test_an_address_can_be_the_name_of_a_certificate(certificate: Certificate) -> None:
    with serving_tcp(sends(OK), certificate.server()) as server:
        address = tcp_address(server.address, certificate.client(), "127.0.0.1")
        with closing(Transport(address, 60.0)) as transport:
            assert read(transport) == b"hello"


def test_a_call_without_a_descriptor_is_a_failed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", fail)
    with pytest.raises(httpx.ConnectError):
        UnixAddress("/nonexistent").connect(1.0)
