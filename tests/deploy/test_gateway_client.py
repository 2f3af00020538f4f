"""The clients of a gateway: which certificates they trust, and that they send the key."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from deploy.gateway_client import gateway_client
from shared.errors import StartError
from shared.settings import Address, Settings
from tests.settings import make_settings
from tests.tls import Certificate


class EchoKey(BaseHTTPRequestHandler):
    """Answers with the request's Authorization header."""

    def do_GET(self) -> None:
        body = (self.headers["Authorization"] or "none").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate(tmp_path)


@pytest.fixture
def settings(certificate: Certificate) -> Iterator[Settings]:
    """Settings of a server that speaks HTTPS with a certificate of a private authority."""
    cert, key = certificate.cert, certificate.key
    server = ThreadingHTTPServer(("127.0.0.1", 0), EchoKey)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield make_settings(bind=Address("0.0.0.0", server.server_port), tls_cert=cert, tls_key=key)
    server.shutdown()
    server.server_close()
    thread.join()


def test_it_trusts_the_certificate_of_the_settings_and_sends_the_key(settings: Settings) -> None:
    environ = {"TERCET_API_KEY": " tct_key\n", "SSL_CERT_FILE": "/nonexistent"}
    with gateway_client(settings, environ) as client:
        assert client.get("/").text == "Bearer tct_key"
    with gateway_client(settings, {}) as client:
        assert client.get("/").text == "none"


def test_it_trusts_no_other_certificate(settings: Settings, tmp_path: Path) -> None:
    other = Certificate(tmp_path, "other").cert
    with (
        gateway_client(make_settings(bind=settings.server.bind, tls_cert=other), {}) as client,
        pytest.raises(httpx.ConnectError, match="certificate verify failed"),
    ):
        client.get("/")


def test_the_client_of_a_url_trusts_the_configured_authorities_and_sends_the_key(
    settings: Settings, certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://localhost:{settings.server.bind.port}"
    with (
        gateway_client(Settings(), {}, url) as client,
        pytest.raises(httpx.ConnectError, match="certificate verify failed"),
    ):
        client.get("/")
    authority = tmp_path / "authority.crt"
    authority.write_bytes(certificate.authority_pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    with gateway_client(Settings(), {"TERCET_API_KEY": "tct_key"}, url) as client:
        assert client.get("/").text == "Bearer tct_key"
    with (
        # 127.0.0.1 by a name that the certificate does not have.
        gateway_client(Settings(), {}, url.replace("localhost", "127.1")) as client,
        pytest.raises(httpx.ConnectError, match="mismatch"),
    ):
        client.get("/")


def test_a_certificate_or_key_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"TERCET_TLS_CERT. cannot be read"):
        gateway_client(make_settings(tls_cert=tmp_path / "missing"), {})
    with pytest.raises(StartError, match="TERCET_API_KEY") as caught:
        gateway_client(Settings(), {"TERCET_API_KEY": "tct_é"})
    assert "é" not in str(caught.value)
