"""The gateway over TLS, without a proxy."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from tests.e2e.harness import ROOT, Tercet, running, until

CONTEXT = {"context": "The old man looked at the sea and"}


class Files:
    """A certificate's files, and contexts of clients that trust only its authority."""

    def __init__(self, base: Path) -> None:
        self.cert, self.key = base / "cert.pem", base / "key.pem"
        self.renew()

    def renew(self) -> None:
        self._authority = trustme.CA()
        issued = self._authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_pem.write_to_path(self.key)
        self.cert.unlink(missing_ok=True)
        for part in issued.cert_chain_pems:
            part.write_to_path(self.cert, append=True)

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self._authority.configure_trust(context)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def tercet(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    with running(
        tmp_path_factory.mktemp("t"), tls_cert=str(files.cert), tls_key=str(files.key), client_timeout_s="1"
    ) as instance:
        yield instance


def test_a_client_that_trusts_the_authority_gets_answers_and_streams(tercet: Tercet, files: Files) -> None:
    with httpx.Client(base_url=tercet.url, verify=files.client(), trust_env=False) as client:
        for _ in range(3):
            assert len(client.post("/autocomplete", json=CONTEXT).json()["sentences"]) == 3
        streamed = client.post("/autocomplete", json={**CONTEXT, "stream": True}).text
        assert "event: token" in streamed
        assert "event: done" in streamed
        large = {"context": "word " * 100_000}  # more than a TLS record and a read of the server
        assert client.post("/autocomplete", json=large).status_code == 200
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{tercet.url}/health/live", trust_env=False)


def test_the_command_line_trusts_the_configured_certificate_alone(tercet: Tercet) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "complete", "Once", "--seed", "1"],
        cwd=ROOT, env=tercet.environ, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.count("Once") == 3


def test_unfinished_handshakes_and_plain_text_are_closed_and_hold_nobody_up(tercet: Tercet, files: Files) -> None:
    address = ("127.0.0.1", tercet.port)
    silent = [socket.create_connection(address) for _ in range(50)]
    plain = socket.create_connection(address)
    plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with httpx.Client(base_url=tercet.url, verify=files.client(), trust_env=False) as client:
        assert client.post("/autocomplete", json=CONTEXT).status_code == 200
    plain.settimeout(5)
    assert b"200" not in plain.recv(1000)
    for sock in silent:
        sock.settimeout(5)
        assert sock.recv(1) == b""
        sock.close()
    plain.close()


def test_old_versions_of_tls_are_refused(tercet: Tercet, files: Files) -> None:
    context = files.client()
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", tercet.port)) as sock,
        pytest.raises((ssl.SSLError, OSError)),
    ):
        context.wrap_socket(sock, server_hostname="localhost")


def test_a_reload_serves_the_renewed_certificate(tercet: Tercet, files: Files) -> None:
    old = files.client()
    files.renew()
    with pytest.raises(ssl.SSLError):
        _handshake(tercet, files.client())
    tercet.processes()["gateway"][0].send_signal(signal.SIGHUP)

    def is_renewed() -> bool:
        try:
            _handshake(tercet, files.client())
        except (ssl.SSLError, OSError):
            return False
        return True

    until(is_renewed, 20, "the renewed certificate")
    with pytest.raises(ssl.SSLError):
        _handshake(tercet, old)


def _handshake(tercet: Tercet, context: ssl.SSLContext) -> None:
    with (
        socket.create_connection(("127.0.0.1", tercet.port), timeout=5) as sock,
        context.wrap_socket(sock, server_hostname="localhost"),
    ):
        pass
