"""The transport to other machines over real sockets, with TLS and without: reuse, retries, cancelling, certificates."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial

import httpx
import pytest
import trustme

from gateway.pool.transport_stock import TransportStock, UntrustedPeer
from tests.gateway.pool.helpers import (
    END,
    HEAD,
    Answer,
    Server,
    chunk,
    read_request,
    sends,
    sends_to_each,
    serving_tcp,
    until,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
NAME = "worker.example"
LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Authority:
    """Issues a server's certificate, and is trusted by its clients."""

    ca: trustme.CA

    def server(self, name: str = NAME, until: datetime.datetime | None = None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(name, not_before=LONG_AGO, not_after=until).configure_cert(context)
        return context

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        return context


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(trustme.CA())


# Makes a server with an answer, a transport to it, and the URL to call.
Serve = Callable[..., AbstractContextManager[tuple[TransportStock, Server, str]]]


@pytest.fixture(params=["http", "https"])
def serve(request: pytest.FixtureRequest, authority: Authority) -> Serve:
    tls, context = (authority.server(), authority.client()) if request.param == "https" else (None, None)

    @contextmanager
    def make(answer: Answer, keepalive_expiry_s: float = 60.0) -> Iterator[tuple[TransportStock, Server, str]]:
        with serving_tcp(answer, tls) as server:
            stock = TransportStock(NAME, keepalive_expiry_s, None if context is None else lambda: context)
            with closing(stock):
                yield stock, server, f"{request.param}://{server.address}/path"

    return make


def post(url: str, content: bytes = b"body", timeout_s: float = 2.0) -> httpx.Request:
    return httpx.Request(
        "POST",
        url,
        stream=httpx.ByteStream(content),
        headers={"Host": NAME, "Content-Length": str(len(content))},
        extensions={"timeout": {"connect": timeout_s, "write": timeout_s, "read": timeout_s}},
    )


def read(stock: TransportStock, request: httpx.Request) -> bytes:
    with closing(stock.handle_request(request)) as response:
        return b"".join(response.iter_raw())


def has_closed(server: Server, num_connections: int) -> bool:
    return server.num_closed == num_connections


def test_the_address_is_connected_to_and_the_host_is_named(serve: Serve) -> None:
    with serve(sends(OK)) as (stock, server, url):
        assert read(stock, post(url, b"some body")) == b"hello"
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /path HTTP/1.1\r\nHost: " + NAME.encode())
    assert body == b"some body"


def test_a_connection_is_reused_after_a_complete_response(serve: Serve) -> None:
    with serve(sends_to_each(OK)) as (stock, server, url):
        assert [read(stock, post(url)) for _ in range(3)] == [b"hello"] * 3
        assert server.num_connections == 1


def test_calls_at_once_have_connections_of_their_own_which_are_kept(serve: Serve) -> None:
    with serve(sends_to_each(OK)) as (stock, server, url):
        with closing(stock.handle_request(post(url))) as first, closing(stock.handle_request(post(url))) as second:
            assert b"".join(second.iter_raw()) == b"".join(first.iter_raw()) == b"hello"
        with closing(stock.handle_request(post(url))), closing(stock.handle_request(post(url))):
            pass
        assert server.num_connections == 2


def test_many_threads_share_a_stock(serve: Serve) -> None:
    with serve(sends_to_each(OK)) as (stock, server, url), ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: read(stock, post(url)), range(200))) == {b"hello"}
        assert server.num_connections <= 8


def test_idle_connections_expire(serve: Serve) -> None:
    with serve(sends_to_each(OK), keepalive_expiry_s=0.05) as (stock, server, url):
        assert read(stock, post(url)) == b"hello"
        time.sleep(0.1)
        assert read(stock, post(url)) == b"hello"
        assert server.num_connections == 2


def test_a_response_closed_early_closes_its_connection(serve: Serve) -> None:
    with serve(sends_to_each(HEAD + chunk(b"first") + chunk(b"second"))) as (stock, server, url):
        for _ in range(2):
            with closing(stock.handle_request(post(url))) as response:
                assert next(response.iter_raw()).startswith(b"first")
        assert until(lambda: server.num_closed == 2)
        assert server.num_connections == 2


def test_a_kept_connection_that_the_peer_closed_while_idle_is_replaced(serve: Serve) -> None:
    with serve(sends(OK)) as (stock, server, url):  # closes after each answer, without saying so
        for number in range(1, 4):
            assert read(stock, post(url)) == b"hello"
            assert until(partial(has_closed, server, number))


def test_a_kept_connection_that_the_peer_closes_when_the_request_arrives_is_retried_once(serve: Serve) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(OK)
        read_request(connection)  # and close, without a byte in answer

    with serve(answer) as (stock, server, url):
        assert read(stock, post(url)) == b"hello"
        assert read(stock, post(url)) == b"hello"
        assert server.num_connections == 2


def test_a_new_connection_that_is_closed_without_an_answer_is_an_error(serve: Serve) -> None:
    with serve(sends()) as (stock, server, url):
        with pytest.raises(httpx.TransportError):
            read(stock, post(url))
        assert server.num_connections == 1


def test_a_timeout_is_not_retried(serve: Serve) -> None:
    release = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(OK)
        read_request(connection)
        release.wait(5)

    with serve(answer) as (stock, server, url):
        assert read(stock, post(url)) == b"hello"
        with pytest.raises(httpx.ReadTimeout):
            read(stock, post(url, timeout_s=0.1))
        release.set()
        assert server.num_connections == 1


def test_the_read_timeout_may_be_changed_before_the_body(serve: Serve) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        time.sleep(0.6)
        connection.sendall(chunk(b"late") + END)

    with serve(answer) as (stock, _server, url):
        request = post(url, timeout_s=0.3)
        with closing(stock.handle_request(request)) as response:
            request.extensions["timeout"]["read"] = 5.0
            assert b"".join(response.iter_raw()) == b"late"


def test_shutting_the_socket_down_wakes_a_blocked_read(serve: Serve) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + chunk(b"first"))
        connection.recv(1)

    with serve(answer) as (stock, server, url):
        with closing(stock.handle_request(post(url, timeout_s=10.0))) as response:
            sock = response.extensions["network_stream"].get_extra_info("socket")
            body = response.iter_raw()
            assert next(body) == b"first"
            begin = time.monotonic()
            threading.Timer(0.05, socket.socket.shutdown, (sock, socket.SHUT_RDWR)).start()
            with pytest.raises(httpx.TransportError) as caught:
                next(body)
        assert time.monotonic() - begin < 5
        assert not isinstance(caught.value, httpx.TimeoutException)
        assert until(lambda: server.num_closed == 1)


def test_a_call_that_ends_after_the_stock_was_closed_closes_its_connection(serve: Serve) -> None:
    with serve(sends_to_each(OK)) as (stock, server, url):
        with closing(stock.handle_request(post(url))) as response:
            stock.close()
            assert b"".join(response.iter_raw()) == b"hello"
        assert until(lambda: server.num_closed == 1)


@pytest.mark.parametrize(
    ("tls", "text"),
    [
        (lambda authority: authority.server("other.example"), "for another name"),
        (lambda authority: authority.server(until=LONG_AGO), "has expired"),
        (lambda _authority: Authority(trustme.CA()).server(), "not trusted .*TERCET_POOL_CA"),
    ],
    ids=["name", "expired", "authority"],
)
def test_a_peer_that_cannot_be_trusted_is_named_clearly(
    authority: Authority, tls: Callable[[Authority], ssl.SSLContext], text: str
) -> None:
    client = authority.client()
    with serving_tcp(sends(OK), tls(authority)) as server:
        stock = TransportStock(NAME, 60.0, lambda: client)
        with closing(stock), pytest.raises(UntrustedPeer, match=text):
            read(stock, post(f"https://{server.address}/path", timeout_s=1.0))


def test_a_peer_without_tls_is_named_clearly(authority: Authority) -> None:
    client = authority.client()

    def answer_hello(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        threads.submit(answer_hello, listener)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/path"
        stock = TransportStock(NAME, 60.0, lambda: client)
        with closing(stock), pytest.raises(UntrustedPeer, match="does not speak TLS"):
            read(stock, post(url))


def test_an_address_can_be_the_name_of_a_certificate(authority: Authority) -> None:
    client = authority.client()
    stock = TransportStock("127.0.0.1", 60.0, lambda: client)
    with serving_tcp(sends(OK), authority.server("127.0.0.1")) as server, closing(stock):
        assert read(stock, post(f"https://{server.address}/path")) == b"hello"


def test_a_refused_connection_says_so(serve: Serve) -> None:
    with serve(sends(OK)) as (stock, _server, url):
        pass
    with pytest.raises(httpx.ConnectError, match=r"^Connection refused$"):
        read(stock, post(url))
