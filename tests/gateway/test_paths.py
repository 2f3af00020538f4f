"""Paths as clients and proxies write them: slashes too many, the path of a proxy, a path near another."""

from __future__ import annotations

import pytest
from falcon import testing

from shared.errors import StartError
from shared.settings import Settings
from tests.gateway.conftest import Gateway, MakeGateway

PUBLIC_URL = "https://notes.example/tools/tercet"


def test_slashes_too_many_change_no_answer(make_gateway: MakeGateway) -> None:
    """A redirect would lose the body of a POST."""
    gateway = make_gateway(timeout_s="0.3")
    for template in gateway.app.routes.keys() - {"/docs"}:  # a page
        plain = template.replace("{name}", "tercet.js").replace("{job_id}", "a")
        for path in (f"{plain}/", f"/{plain}", plain.replace("/", "//") + "//"):
            for method in ("GET", "HEAD", "POST"):
                answer, expected = (gateway.client.simulate_request(method, each) for each in (path, plain))
                assert (answer.status_code, answer.headers["content-type"]) == (
                    expected.status_code,
                    expected.headers["content-type"],
                ), (method, path)


@pytest.mark.parametrize("path", ["/static/", "/v1/models/other/", "/static/tercet.js/x", "/health/live/x/"])
def test_a_path_that_is_not_served_is_not_served_with_slashes(gateway: Gateway, path: str) -> None:
    assert gateway.client.simulate_get(path).status_code == 404


@pytest.mark.parametrize("path", ["/docs/", "/docs//", "/slots/", "//docs/"])
def test_a_page_is_opened_where_its_links_work(gateway: Gateway, path: str) -> None:
    """Its links are relative, and the proxy's path is not known here."""
    answer = gateway.client.simulate_get(path, headers={"Accept": "text/html"})
    assert answer.status_code == 308
    assert answer.headers["Location"] == "../" * (len(path) - len(path.rstrip("/"))) + path.strip("/")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/completions", "POST /v1/completions"),
        ("/completion", "POST /v1/completions"),
        ("/api/v1/completions/", "POST /v1/completions"),
        ("/v1/chat/completions", "POST /v1/completions"),
        ("/models", "GET /v1/models"),
        ("/v1/autocomplete", "POST /autocomplete"),
        ("/autocompletes", "POST /autocomplete"),
        ("/Autocomplete", "POST /autocomplete"),
        ("/generate/stream", "POST /generate"),
        ("/healthcheck", "GET /health"),
        ("/metrics/x", "GET /metrics"),
    ],
)
def test_the_404_of_a_path_near_another_names_that(gateway: Gateway, path: str, meant: str) -> None:
    answer = gateway.client.simulate_post(path, body=b"{}")
    assert answer.status_code == 404
    assert meant in answer.text


@pytest.mark.parametrize("path", ["/nothing", "/v1/embeddings", "/api/chat", "/static/no.js", "/x/y/z"])
def test_the_404_of_any_other_path_guesses_nothing(gateway: Gateway, path: str) -> None:
    answer = gateway.client.simulate_get(path)
    assert answer.status_code == 404
    assert "did you mean" not in answer.text


# Below a path of a proxy ------------------------------------------------------------------------


@pytest.fixture
def below(make_gateway: MakeGateway) -> testing.TestClient:
    return make_gateway(public_url=PUBLIC_URL).client


@pytest.mark.parametrize("prefix", ["", "/tools/tercet"], ids=["removed", "left"])
def test_the_proxy_may_remove_its_path_or_leave_it(below: testing.TestClient, prefix: str) -> None:
    headers = {"Host": "notes.example"}
    assert below.simulate_get(f"{prefix}/health/live", headers=headers).status_code == 200
    assert below.simulate_get(f"{prefix}/static/tercet.js", headers=headers).status_code == 200
    assert below.simulate_get(f"{prefix}/", headers=headers).headers["content-type"].startswith("text/html")
    assert below.simulate_get(f"{prefix}/endpoint", headers=headers).text == PUBLIC_URL
    assert below.simulate_get(f"{prefix}/openapi.json", headers=headers).json["servers"] == [{"url": PUBLIC_URL}]
    refused = below.simulate_get(f"{prefix}/autocomplete", headers=headers)
    assert refused.json["detail"].endswith(f" {PUBLIC_URL}/autocomplete")


@pytest.mark.parametrize("host", ["notes.example", "127.0.0.1:8000"])
def test_pages_of_the_public_url_may_use_the_server(below: testing.TestClient, host: str) -> None:
    """Also where the proxy replaces the Host header."""
    for origin, is_own in (("https://notes.example", True), ("https://other.example", False)):
        answer = below.simulate_post("/autocomplete", body=b"", headers={"Host": host, "Origin": origin})
        assert (answer.status_code != 403) == is_own


def test_the_page_at_the_path_without_a_slash_is_opened_with_one(below: testing.TestClient) -> None:
    answer = below.simulate_get("/tools/tercet")
    assert (answer.status_code, answer.headers["Location"]) == (308, "./tercet/")


@pytest.mark.parametrize("path", ["/tools/tercets/health/live", "/tools", "/other/tools/tercet/health/live"])
def test_another_path_is_not_removed(below: testing.TestClient, path: str) -> None:
    assert below.simulate_get(path).status_code == 404


@pytest.mark.parametrize("prefix", ["/v1", "/jobs", "/static"])
def test_a_path_that_begins_as_a_route_does_hides_no_route(make_gateway: MakeGateway, prefix: str) -> None:
    client = make_gateway(public_url=f"https://notes.example{prefix}").client
    assert client.simulate_get("/v1/models").status_code == 200
    assert client.simulate_get("/static/tercet.js").status_code == 200
    assert client.simulate_get(f"{prefix}/v1/models").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-Prefix": "/evil"},
        {"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "https"},
        {"Forwarded": "host=evil.example;proto=https"},
        {"X-Original-Url": "/metrics", "X-Rewrite-Url": "/metrics", "X-Script-Name": "/evil"},
    ],
)
def test_no_forwarded_header_is_believed(gateway: Gateway, headers: dict[str, str]) -> None:
    assert gateway.client.simulate_get("/endpoint", headers=headers).text == "http://localhost:8000"
    assert "servers" not in gateway.client.simulate_get("/openapi.json", headers=headers).json
    refused = gateway.client.simulate_get("/autocomplete", headers=headers)
    assert refused.json["detail"].endswith(" http://localhost:8000/autocomplete")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://notes.example/tools/tercet/", PUBLIC_URL),
        ("HTTP://Notes.example:8443", "http://notes.example:8443"),
        ("http://[::1]:80/A", "http://[::1]:80/A"),
    ],
)
def test_public_urls(text: str, expected: str) -> None:
    settings = Settings.load({"TERCET_PUBLIC_URL": text})
    assert settings.access.public_url == expected
    assert settings.allows_host("notes.example") == ("otes" in text)


@pytest.mark.parametrize(
    "text",
    [
        *("/tools/tercet", "notes.example/tools", "ftp://notes.example", "https://", "https:///a", "https://a b/"),
        *("https://notes.example//a", "https://notes.example/a/../b", "https://notes.example/a?b", "https://n/%2f"),
        *("https://user@notes.example/a", "https://notes.example/a#b", "https://notes.example/a\nb"),
    ],
)
def test_other_public_urls_are_refused(text: str) -> None:
    with pytest.raises(StartError, match=r"TERCET_PUBLIC_URL=.* must be http"):
        Settings.load({"TERCET_PUBLIC_URL": text})
