"""The gateway over TLS, without a proxy."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime

import httpx
import pytest

from tests.e2e.harness import Tercet, running, until
from tests.e2e.shared_servers import SharedServer
from tests.tls import Certificate

pytestmark = pytest.mark.quick
CONTEXT = {"context": "The old man looked at the sea and"}


@pytest.fixture
def tercet(certificate: Certificate, server_with: Callable[..., SharedServer]) -> SharedServer:
    return server_with(certificate, client_timeout_s="4")


def test_a_client_that_trusts_the_authority_gets_answers_and_streams(tercet: Tercet, certificate: Certificate) -> None:
    with httpx.Client(base_url=tercet.url, verify=certificate.client(), trust_env=False) as client:
        for _ in range(3):
            assert len(client.post("/autocomplete", json=CONTEXT).json()["sentences"]) == 3
        streamed = client.post("/autocomplete", json={**CONTEXT, "stream": True}).text
        assert "event: token" in streamed
        assert "event: done" in streamed
        large = {"context": "word " * 100_000}  # more than a TLS record and a read of the server
        assert client.post("/autocomplete", json=large).status_code == 200
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{tercet.url}/health/live", trust_env=False)


def test_unfinished_handshakes_and_plain_text_are_closed(tercet: Tercet, certificate: Certificate) -> None:
    address = ("127.0.0.1", tercet.port)
    silent = [socket.create_connection(address) for _ in range(50)]
    plain = socket.create_connection(address)
    plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with httpx.Client(base_url=tercet.url, verify=certificate.client(), trust_env=False) as client:
        assert client.post("/autocomplete", json=CONTEXT).status_code == 200
    plain.settimeout(30)
    assert plain.recv(1000).startswith(b"HTTP/1.1 400 ")
    for sock in silent:
        sock.settimeout(30)
        assert sock.recv(1) == b""
        sock.close()
    plain.close()


@pytest.mark.integration
def test_a_reload_serves_the_renewed_certificate(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The metric is of the certificate that is served, which may be an older one than the file's."""
    certificate = Certificate(tmp_path_factory.mktemp("c"))
    expiry, new_expiry = datetime(2040, 1, 1, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)
    certificate.renew(expiry)
    old = certificate.client()
    with running(tmp_path_factory.mktemp("t"), certificate) as tercet:
        master, first_worker = tercet.processes()["gateway"]
        # Files that are wrong: the reload is refused, and also a new worker serves with the old ones.
        certificate.key.write_text("rubbish")
        master.send_signal(signal.SIGHUP)
        [refused] = until(lambda: tercet.events("reload_finished"), 20, "the reload is reported")
        assert refused["outcome"] == "failed"
        assert "not a certificate and its unencrypted private key" in refused["reason"]
        first_worker.kill()
        until(lambda: not first_worker.is_running() and _serves(tercet, old), 20, "the worker is replaced")
        certificate.renew(new_expiry)
        assert not _serves(tercet, certificate.client())
        assert _expiry(tercet, old) == expiry
        _, old_worker = tercet.processes()["gateway"]
        master.send_signal(signal.SIGHUP)
        # Until the old worker ends, either worker may take a connection.
        until(lambda: not old_worker.is_running(), 20, "the end of the old worker")
        assert _serves(tercet, certificate.client())
        assert not _serves(tercet, old)
        assert _expiry(tercet, certificate.client()) == new_expiry


def _expiry(tercet: Tercet, context: ssl.SSLContext) -> datetime:
    with httpx.Client(base_url=tercet.url, verify=context, trust_env=False) as client:
        lines = client.get("/metrics").text.splitlines()
    [value] = (line.split()[1] for line in lines if line.startswith("tercet_gateway_certificate_expiry_seconds "))
    return datetime.fromtimestamp(float(value), UTC)


def _serves(tercet: Tercet, context: ssl.SSLContext) -> bool:
    """Whether the gateway has a certificate that a client trusts."""
    with socket.create_connection(("127.0.0.1", tercet.port), timeout=10) as sock:
        try:
            context.wrap_socket(sock, server_hostname="localhost").close()
        except ssl.SSLError:
            return False
    return True
