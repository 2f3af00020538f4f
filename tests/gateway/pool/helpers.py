"""A real server on a Unix socket or a TCP port that sends exactly the bytes a test wants, well-formed or not."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.gateway.generation.stubs import make_done, read_request

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = make_done([" it"])

# Answers the first request of a connection, which has been read; the connection is closed afterwards.
Answer = Callable[[socket.socket], object]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def line(value: msgspec.Struct) -> bytes:
    """A chunk with one line of the internal protocol."""
    return chunk(msgspec.json.encode(value) + b"\n")


def sends(*parts: bytes) -> Answer:
    """Sends these bytes, then closes the connection."""

    def answer(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)

    return answer


def respond(connection: socket.socket, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    """Send a response that ends with its connection."""
    fields = {**(headers or {}), "Connection": "close", "Content-Length": str(len(body))}
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in fields.items())]
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def sends_to_each(data: bytes) -> Answer:
    """Sends the same bytes to each request of the connection until the client closes it."""

    def answer(connection: socket.socket) -> None:
        while True:
            connection.sendall(data)
            read_request(connection)

    return answer


@dataclass
class Server:
    """`requests` has the first request of each connection; `num_closed` counts connections that it has closed."""

    address: str
    requests: list[bytes] = field(default_factory=list)
    num_closed: int = 0

    @property
    def num_connections(self) -> int:
        return len(self.requests)


def port_of(server: Server) -> int:
    """The port of a server at one."""
    return int(server.address.rpartition(":")[2])


@contextmanager
def serving(folder: Path, answer: Answer) -> Iterator[Server]:
    """A server in a folder, one thread per connection. On exit, the client must have closed its connections."""
    address = str(folder / "slot.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        try:
            with _answering(listener, Server(address), lambda connection, _request: answer(connection)) as server:
                yield server
        finally:
            Path(address).unlink()


@contextmanager
def serving_tcp(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """As `serving`, at a port of 127.0.0.1; its address is that with the port."""
    with serving_requests(lambda connection, _request: answer(connection), tls) as server:
        yield server


@contextmanager
def serving_requests(
    answer: Callable[[socket.socket, bytes], object],
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Iterator[Server]:
    """As `serving_tcp`; the answer gets the first request of its connection too."""
    with socket.create_server((host, port)) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        with _answering(listener, Server(address), answer, tls) as server:
            yield server


@contextmanager
def _answering(
    listener: socket.socket,
    server: Server,
    answer: Callable[[socket.socket, bytes], object],
    tls: ssl.SSLContext | None = None,
) -> Iterator[Server]:
    threads: list[threading.Thread] = []

    def serve(plain: socket.socket) -> None:
        with suppress(OSError), plain:  # a client may close before the answer is complete, or refuse the certificate
            connection = plain if tls is None else tls.wrap_socket(plain, server_side=True)
            with connection:
                request = read_request(connection)
                server.requests.append(request)
                answer(connection, request)
        server.num_closed += 1

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    listener.listen()
    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield server
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join()
        for thread in threads:
            thread.join()
