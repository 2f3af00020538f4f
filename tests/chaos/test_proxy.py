"""The chaos proxy disturbs connections as its faults say, on TCP and on Unix sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.chaos.http_client import LOOPBACK, Endpoint
from tests.chaos.proxy import FAULTS, ChaosProxy, Fault, always, random_schedule

ANSWER = bytes(range(256)) * 4


@contextmanager
def server(path: Path | None) -> Iterator[Endpoint]:
    """Answers whatever it reads with `ANSWER`, and keeps the connection."""
    listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
    listener.bind(str(path) if path else (LOOPBACK, 0))
    listener.listen()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            while connection.recv(65536):
                connection.sendall(ANSWER)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield Endpoint(path=path) if path else Endpoint(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@contextmanager
def proxied(base: Path, fault: Fault, *, is_unix: bool) -> Iterator[tuple[socket.socket, ChaosProxy]]:
    """A client's connection through a proxy with this fault."""
    with server(base / "server" if is_unix else None) as endpoint:
        proxy = ChaosProxy(endpoint, base / "proxy" if is_unix else None, always(fault))
        proxy.start()
        try:
            front = Endpoint(path=proxy.path) if proxy.path else Endpoint(proxy.port)
            with front.connect(5.0) as client:
                client.sendall(b"?")
                yield client, proxy
        finally:
            proxy.stop()


def read(client: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (chunk := client.recv(num_bytes - len(data))):
        data += chunk
    return data


@pytest.fixture(params=[True, False], ids=["unix", "tcp"])
def is_unix(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short enough for Unix sockets."""
    return tmp_path_factory.mktemp("p")


def test_without_a_fault_every_byte_passes_in_both_directions(base: Path, is_unix: bool) -> None:
    with proxied(base, Fault(), is_unix=is_unix) as (client, proxy):
        assert read(client, len(ANSWER)) == ANSWER
        client.sendall(b"?")
        assert read(client, len(ANSWER)) == ANSWER
        assert proxy.counts == {"none": 1}


def test_delay_holds_the_response_back(base: Path, is_unix: bool) -> None:
    started_at = time.monotonic()
    with proxied(base, Fault("delay", pause_s=0.3), is_unix=is_unix) as (client, _):
        assert read(client, len(ANSWER)) == ANSWER
    assert time.monotonic() - started_at >= 0.3


def test_drip_sends_single_bytes(base: Path, is_unix: bool) -> None:
    with proxied(base, Fault("drip", after_bytes=100, pause_s=0.05), is_unix=is_unix) as (client, _):
        assert read(client, 100) == ANSWER[:100]
        started_at = time.monotonic()
        assert read(client, 5) == ANSWER[100:105]
        assert time.monotonic() - started_at >= 4 * 0.05 - 0.01


def test_truncate_ends_the_response_in_order(base: Path, is_unix: bool) -> None:
    with proxied(base, Fault("truncate", after_bytes=100), is_unix=is_unix) as (client, _):
        assert read(client, len(ANSWER)) == ANSWER[:100]


def test_reset_on_tcp_is_seen_as_a_reset(base: Path) -> None:
    with proxied(base, Fault("reset"), is_unix=False) as (client, _), pytest.raises(ConnectionResetError):
        client.recv(1)


def test_blackhole_keeps_the_connection_and_forwards_nothing(base: Path, is_unix: bool) -> None:
    with proxied(base, Fault("blackhole", after_bytes=100), is_unix=is_unix) as (client, _):
        assert read(client, 100) == ANSWER[:100]
        client.sendall(b"?")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_stopping_closes_connections_and_ends_the_thread(base: Path) -> None:
    with proxied(base, Fault("blackhole"), is_unix=True) as (client, proxy):
        proxy.stop()
        with suppress(ConnectionResetError):  # the request was not read
            assert client.recv(1) == b""
        assert "proxy" not in {thread.name for thread in threading.enumerate()}
        assert not (base / "proxy").exists()


def test_dropped_connections_end(base: Path, is_unix: bool) -> None:
    with proxied(base, Fault(), is_unix=is_unix) as (client, proxy):
        assert read(client, len(ANSWER)) == ANSWER
        proxy.drop_connections()
        assert client.recv(1) == b""


def test_a_schedule_repeats_with_its_seed_and_has_every_fault() -> None:
    first, again, other = (random_schedule(seed, 0.5) for seed in (1, 1, 2))
    faults = [first(number) for number in range(400)]
    assert faults == [again(number) for number in range(400)]
    assert faults != [other(number) for number in range(400)]
    kinds = [fault.kind for fault in faults]
    assert set(kinds) == {"none", *FAULTS}
    assert kinds.count("none") == pytest.approx(200, abs=50)
