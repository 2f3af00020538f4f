"""The clients of a gateway: which certificates they trust, and that they send the key."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from deploy.gateway_client import gateway_client, tls_problem
from shared.errors import StartError
from shared.setting_values import Address
from shared.settings import Settings
from shared.version import tercet_version
from tests.e2e.harness import free_port
from tests.gateway.pool.helpers import port_of, respond, serving_requests
from tests.settings import make_settings
from tests.tls import Certificate


def echo_key(connection: socket.socket, request: bytes) -> None:
    """Answers with the request's Authorization header."""
    found = re.search(rb"^authorization: (.*)\r$", request, re.IGNORECASE | re.MULTILINE)
    respond(connection, 200, found[1] if found else b"none")


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate(tmp_path)


@pytest.fixture
def settings(certificate: Certificate) -> Iterator[Settings]:
    """Settings of a server that speaks HTTPS with a certificate of a private authority."""
    with serving_requests(echo_key, certificate.server()) as server:
        bind = Address("0.0.0.0", port_of(server))
        yield make_settings(bind=bind, tls_cert=certificate.cert, tls_key=certificate.key)


def test_it_trusts_the_certificate_of_the_settings_and_sends_the_key(settings: Settings) -> None:
    environ = {"TERCET_API_KEY": " tct_key\n", "SSL_CERT_FILE": "/nonexistent"}
    with gateway_client(settings, environ) as client:
        assert client.get("/").text == "Bearer tct_key"
    with gateway_client(settings, {}) as client:
        assert client.get("/").text == "none"


def test_the_key_may_be_in_a_file(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("tct_key\n")
    with gateway_client(settings, {"TERCET_API_KEY_FILE": str(tmp_path / "key")}) as client:
        assert client.get("/").text == "Bearer tct_key"
        assert client.headers["user-agent"] == f"tercet/{tercet_version()}"
    with pytest.raises(StartError, match="TERCET_API_KEY_FILE cannot be read"):
        gateway_client(settings, {"TERCET_API_KEY_FILE": str(tmp_path / "none")})


def test_the_client_of_a_url_trusts_the_configured_authorities_and_sends_the_key(
    settings: Settings, certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://localhost:{settings.server.bind.port}"
    authority = tmp_path / "authority.crt"
    authority.write_bytes(certificate.authority_pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    with gateway_client(Settings(), {"TERCET_API_KEY": "tct_key"}, url) as client:
        assert client.get("/").text == "Bearer tct_key"


def refuse_two(listener: socket.socket) -> None:
    """As a server of plain HTTP answers what it cannot parse."""
    for _ in range(2):
        connection, _address = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def problem_of(settings: Settings, url: str | None) -> str:
    with gateway_client(settings, {}, url) as client, pytest.raises(httpx.TransportError) as caught:
        client.get("/")
    return tls_problem(caught.value, url)


def test_a_problem_of_tls_says_what_to_do(
    settings: Settings, certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://localhost:{settings.server.bind.port}"
    assert "set SSL_CERT_FILE to a file with the authority's certificate" in problem_of(Settings(), url)
    other = make_settings(bind=settings.server.bind, tls_cert=Certificate(tmp_path, "other").cert)
    assert "another certificate than TERCET_TLS_CERT" in problem_of(other, None)
    authority = tmp_path / "authority.crt"
    authority.write_bytes(certificate.authority_pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    assert "for other names" in problem_of(Settings(), url.replace("localhost", "127.1"))


def test_an_expired_certificate_and_plain_http_are_told_apart(
    certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate.renew(datetime(2020, 1, 1, tzinfo=UTC))
    authority = tmp_path / "authority.crt"
    authority.write_bytes(certificate.authority_pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    with serving_requests(echo_key, certificate.server()) as server:
        assert "has expired" in problem_of(Settings(), f"https://localhost:{port_of(server)}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=refuse_two, args=(listener,)).start()
        port = listener.getsockname()[1]
        assert "use http:// in the URL" in problem_of(Settings(), f"https://localhost:{port}")
        own = make_settings(bind=Address("127.0.0.1", port), tls_cert=certificate.cert)
        assert "unset TERCET_TLS_CERT" in problem_of(own, None)
    assert problem_of(Settings(), f"https://127.0.0.1:{free_port()}") == ""


def test_a_certificate_or_key_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"TERCET_TLS_CERT. cannot be read"):
        gateway_client(make_settings(tls_cert=tmp_path / "missing"), {})
    with pytest.raises(StartError, match="TERCET_API_KEY") as caught:
        gateway_client(Settings(), {"TERCET_API_KEY": "tct_é"})
    assert "é" not in str(caught.value)
