"""Host and Origin checks, and the CORS headers that allowed pages need."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from falcon.testing import Result

from gateway.server.request_parser import RequestParser
from shared.errors import MalformedRequest
from tests.gateway.conftest import Gateway, MakeGateway

LISTED = "https://notes.example"
CORS = "Access-Control-Allow-Origin"


@pytest.fixture
def listed(make_echo: MakeGateway) -> Gateway:
    return make_echo(origins=f"https://other.example,{LISTED}", hosts="tercet.example")


def test_hosts_that_are_not_listed_are_refused_on_every_route(listed: Gateway) -> None:
    """`tests/shared/test_settings.py` has the rules."""
    get = listed.client.simulate_get
    for host in ("localhost:8000", "10.1.2.3:80", "[::1]", "Tercet.Example:8000"):
        assert get("/echo", headers={"Host": host}).status_code == 200, host
    for host in ("", "evil.example", "[localhost]evil.com"):
        for path in ("/echo", "/", "/metrics", "/slots", "/health/live/more", "/nothing"):
            response = get(path, headers={"Host": host})
            assert (response.status_code, response.json["code"]) == (421, "unknown_host"), (host, path)
            assert f"Host {host!r}" in response.json["detail"]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/health", "/healthz", "/ping"])
@pytest.mark.parametrize("host", ["", "tercet.default.svc", "10.0.0.7:8000", "evil.example", "no host", "a:b:c"])
def test_health_checks_are_answered_whatever_host_they_name(listed: Gateway, path: str, host: str) -> None:
    status = 200 if path == "/health/live" else 503  # no slot is warm
    for method in ("GET", "HEAD"):
        assert listed.client.simulate_request(method, path, headers={"Host": host}).status_code == status
    headers = {"Host": host, "Origin": "https://foreign.example"}
    assert listed.client.simulate_get(path, headers=headers).status_code == 403


@pytest.mark.parametrize("origin", ["null", "", "http://", "https://", "://", "file://", "about:blank"])
@pytest.mark.parametrize("host", ["", "localhost:8000"])
def test_an_origin_without_a_host_is_never_our_own(make_echo: MakeGateway, host: str, origin: str) -> None:
    response = make_echo(hosts="*").client.simulate_get("/echo", headers={"Host": host, "Origin": origin})
    assert (response.status_code, response.json["code"]) == (403, "forbidden_origin")


@pytest.mark.parametrize("scheme", ["http", "https", None])
@pytest.mark.parametrize("host", ["localhost:8000", "localhost.:8000", "notes.localhost:8000", "a.b.localhost"])
def test_our_own_pages_and_what_is_no_page_need_no_cors_headers(echo: Gateway, scheme: str | None, host: str) -> None:
    headers = {"Host": host} | ({"Origin": f"{scheme}://{host}"} if scheme else {})
    response = echo.client.simulate_post("/echo", body=b"{}", headers=headers)
    assert response.status_code == 200
    assert not {CORS.lower(), "vary"} & response.headers.keys()


EXTENSION = "chrome-extension://abcdefghijklmnop"


@pytest.mark.parametrize(
    "origin",
    [
        EXTENSION,
        "tauri://localhost",
        "vscode-webview://1lqrqbgd1kjq4tqm0c7b0qk2m7vv0k6ppl3mj9ua",
        "vscode-webview://another",
        "safari-web-extension://0F5C6A5E-97B4-4D2B-8A77-3C1F54F2A9D1",  # Safari's capitals
    ],
)
def test_pages_of_listed_extensions_and_apps_are_served(make_echo: MakeGateway, origin: str) -> None:
    safari = "safari-web-extension://0f5c6a5e-97b4-4d2b-8a77-3c1f54f2a9d1"
    origins = f"{EXTENSION},{safari},tauri://localhost,vscode-webview://*"
    response = make_echo(origins=origins).client.simulate_post("/echo", body=b"{}", headers={"Origin": origin})
    assert (response.status_code, response.headers[CORS]) == (200, origin)


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost:9000",
        "http://localhost",
        "https://notes.example.evil",
        "http://notes.example",
        "https://notes.example:444",
        "http://localhost:8000.evil.example",
        "http://evil.localhost:8000",
        "chrome-extension://ponmlkjihgfedcba",
        "moz-extension://abcdefghijklmnop",
        "vscode-webview://",
        "vscode-webview://a/b",
        "vscode-webview://a b",
        "https://vscode-webview",
        "https://*",
        "file://",
    ],
)
def test_other_pages_are_refused_and_may_not_read_why(make_echo: MakeGateway, origin: str) -> None:
    gateway = make_echo(origins=f"{LISTED},{EXTENSION},vscode-webview://*")
    for method in ("GET", "POST", "OPTIONS"):
        response = gateway.client.simulate_request(method, "/echo", headers={"Origin": origin})
        assert (response.status_code, response.json["code"]) == (403, "forbidden_origin")
        assert response.json["detail"] == f"Pages of {origin!r} may not use this server; add it to TERCET_ORIGINS."
        assert CORS not in response.headers


@pytest.mark.parametrize("origin", ["https://evil.example", "null", LISTED, "http://localhost", None])
def test_pages_of_any_origin_may_read_static_files(listed: Gateway, origin: str | None) -> None:
    """The same for all, so that no cache needs `Vary`. Nothing else of the server is open to them."""
    headers = {"Origin": origin} if origin else {}
    for method in ("GET", "HEAD"):
        response = listed.client.simulate_request(method, "/static/tercet.js", headers=headers)
        assert response.status_code in {200, 404}
        assert response.headers[CORS] == "*"
        assert "Vary" not in response.headers
    if origin == "https://evil.example":
        assert listed.client.simulate_post("/static/tercet.js", headers=headers).status_code == 403
        assert listed.client.simulate_get("/static/tercet.js", headers=headers | {"Host": "evil"}).status_code == 421
        assert listed.client.simulate_get("/staticfiles", headers=headers).status_code == 403


def test_listed_pages_may_read_the_answer_and_its_headers(listed: Gateway) -> None:
    response = listed.client.simulate_post("/echo", body=b"{}", headers={"Origin": LISTED})
    assert (response.status_code, response.headers[CORS], response.headers["Vary"]) == (200, LISTED, "Origin")
    exposed = "X-Request-Id, Server-Timing, Retry-After, x-should-retry, Location, Preference-Applied, WWW-Authenticate"
    assert response.headers["Access-Control-Expose-Headers"] == f"{exposed}, Allow"


def preflight(
    gateway: Gateway, path: str = "/echo", method: str = "POST", origin: str = LISTED, **requested: str
) -> Result:
    headers = {"Origin": origin, "Access-Control-Request-Method": method}
    headers |= {f"Access-Control-Request-{name.replace('_', '-')}": value for name, value in requested.items()}
    return gateway.client.simulate_options(path, headers=headers)


def test_a_preflight_of_a_listed_page_is_answered_before_routing(listed: Gateway) -> None:
    for path in ("/echo", "/autocomplete", "/nothing"):
        response = preflight(listed, path)
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers[CORS] == LISTED
        assert response.headers["Access-Control-Max-Age"] == "600"
        assert {"x-request-id", "server-timing"} <= response.headers.keys()
        vary = response.headers["Vary"].split(", ")
        assert vary == ["Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers"]
        # None was requested.
        assert "Access-Control-Allow-Headers" not in response.headers
        assert "Access-Control-Allow-Private-Network" not in response.headers


OPENAI_HEADERS = "authorization,content-type,x-stainless-os,x-stainless-retry-count"


@pytest.mark.parametrize(
    ("requested", "allowed"),
    [
        (OPENAI_HEADERS, OPENAI_HEADERS),
        ("X-Session-Id, HTTP-Referer ,x-title", "X-Session-Id,HTTP-Referer,x-title"),
        ("x_underscore,cache-control,sentry-trace", "x_underscore,cache-control,sentry-trace"),
        ("content-type,bad name,x-é,x:y,,x-good", "content-type,x-good"),
        ("not valid", ""),
    ],
)
def test_a_preflight_allows_the_valid_headers_that_it_names(listed: Gateway, requested: str, allowed: str) -> None:
    response = preflight(listed, Headers=requested.encode().decode("latin-1"))
    assert response.headers.get("Access-Control-Allow-Headers", "") == allowed.replace(",", ", ")


@pytest.mark.parametrize(
    ("method", "added"),
    # A browser compares a method with what the page wrote.
    [("DELETE", ""), ("PUT", ", PUT"), ("PATCH", ", PATCH"), ("patch", ", patch"), ("GET, X", "")],
)
def test_a_preflight_allows_the_method_that_it_names(listed: Gateway, method: str, added: str) -> None:
    response = preflight(listed, method=method)
    assert response.status_code == 204
    assert response.headers["Access-Control-Allow-Methods"] == f"GET, POST, DELETE{added}"


@pytest.mark.parametrize("network", ["Private_Network", "Local_Network"])
def test_a_preflight_for_a_private_address_is_answered(listed: Gateway, network: str) -> None:
    allowed = f"Access-Control-Allow-{network.replace('_', '-')}"
    for value in ("true", "false", ""):
        response = preflight(listed, **{network: value})
        assert response.headers.get(allowed) == ("true" if value == "true" else None)
    response = preflight(listed, origin="https://evil.example", **{network: "true"})
    assert response.status_code == 403
    assert allowed not in response.headers


def test_options_without_a_preflight_lists_the_methods(listed: Gateway) -> None:
    for headers in ({}, {"Origin": LISTED}):
        response = listed.client.simulate_options("/echo", headers=headers)
        assert response.status_code == 200
        assert set(response.headers["Allow"].split(", ")) >= {"GET", "POST"}
        assert "Access-Control-Allow-Methods" not in response.headers


@pytest.mark.parametrize(
    ("fields", "is_readable"),
    [
        (f"origin:{LISTED} ", True),
        ("Origin: https://evil.example", False),
        (f"Origin: {LISTED}\r\nOrigin: https://evil.example", False),
        (f"Referer: {LISTED}/page", False),
        (f"Bad field\r\n\r\nOrigin: {LISTED}", False),  # in the body
    ],
)
def test_a_listed_page_may_read_why_no_request_was_read(listed: Gateway, fields: str, is_readable: bool) -> None:
    parser = RequestParser(0)
    with pytest.raises(MalformedRequest):
        parser.advance(f"GET / HTTP/1.1\r\nHost: localhost\r\n{fields}\r\nBad field\r\n\r\n".encode())
    answer = Mock()
    b"".join(listed.app.refuse(parser.answered_head, MalformedRequest("Bad field"), answer))
    assert dict(answer.call_args.args[1]).get(CORS) == (LISTED if is_readable else None)
