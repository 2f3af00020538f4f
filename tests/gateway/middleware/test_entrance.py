"""API keys: every route needs one unless it is listed as open, however its path is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import falcon
import pytest
from falcon import inspect
from structlog.testing import capture_logs

from gateway.routes import READY_PATHS
from gateway.server.request_parser import parse_head
from gateway.server.served_app import Work
from shared.api_keys import new_key, read_keys
from shared.errors import NotReady, ShuttingDown, Unauthorized
from shared.protocol import State
from tests.bad_requests import HttpRequest, call_app
from tests.gateway.conftest import Gateway, MakeGateway
from tests.gateway.middleware.conftest import Echo

STATIC = {"/static/{name}", "/static/vendor/{name}"}
OPEN = {"/", *STATIC, "/service_worker.js", "/docs", "/openapi.json", "/health/live", *READY_PATHS}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "NONSENSE")


class Reached:
    """Middleware: the method and URI template of every request that the app passes to a resource."""

    def __init__(self) -> None:
        self.routes: set[tuple[str, str | None]] = set()

    def process_resource(self, req: falcon.Request, *_args: object) -> None:
        self.routes.add((req.method, req.uri_template))


class WhoAmI:
    """Answers with what the middleware knows of the request's key."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.media = {"owner": req.context.owner, "name": req.context.key and req.context.key.name}


@pytest.fixture
def key_path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def key(key_path: Path) -> str:
    return new_key(key_path, "first")[0]


@pytest.fixture
def keyed(make_echo: MakeGateway, key_path: Path, key: str) -> Gateway:
    """A gateway that requires keys, with the routes of `make_echo`, which are not listed as open, and `/who`."""
    gateway = make_echo(keys=str(key_path), origins="https://notes.example")
    gateway.app.add_route("/who", WhoAmI())
    return gateway


def routes(gateway: Gateway) -> list[str]:
    """Every URI template of the router, with a value for its fields."""
    return [route.path.replace("{name}", "tercet.js") for route in inspect.inspect_routes(gateway.app)]


def spellings(path: str) -> Iterator[str]:
    """A path and other ways to write it, as a client would to reach it around a check of the text."""
    yield path
    yield f"{path}/"
    yield f"/{path}"
    yield f"//{path}"
    yield path.upper()
    yield path.title()
    yield f"{path}%2f"
    yield f"/%2f{path[1:]}"
    yield path[0] + path[1:].replace("/", "%2f")
    yield path[0] + path[1:].replace("/", "%252f")
    yield path[0] + path[1:].replace("/", "\\")
    yield "/" + "".join(f"%{ord(letter):02x}" for letter in path[1:])
    for start in ("/health/live", "/static", "/ping", "/static/tercet.js"):
        for step in ("/..", "/..;", "/..;/", "/%2e%2e", "%2f..", "/.", ";", "?", "%3f", "%00", "%0a", "%20"):
            yield f"{start}{step}{path}"
    for end in ("..;", "/..;/", ";.css", ";/health/live", "/../health/live", "/.", "%00", "%20", ".json", "?/ping"):
        yield f"{path}{end}"


def test_without_a_key_only_open_routes_are_reached_however_a_path_is_written(keyed: Gateway, key: str) -> None:
    reached = Reached()
    keyed.app.add_middleware(reached)
    paths = {spelling for path in [*routes(keyed), "/nothing"] for spelling in spellings(path)}
    assert len(paths) > 500
    sent: list[dict[str, str]] = [{}, {"x-api-key": key[:-1]}]
    requests = [(method, path, headers) for path in routes(keyed) for method in METHODS for headers in sent]
    requests += [(method, path, {}) for path in sorted(paths) for method in ("GET", "POST")]
    num_refused = 0
    with capture_logs():
        for method, path, headers in requests:
            reached.routes.clear()
            status, response_headers, _ = call_app(keyed.app, HttpRequest(method, path, headers=headers))
            if not reached.routes:
                assert (status, response_headers.get("www-authenticate")) == (401, "Bearer"), (method, path)
                num_refused += 1
            for reached_method, template in reached.routes:
                assert reached_method in {"GET", "HEAD"}, path
                assert template in OPEN, path
    assert num_refused > 1000


def test_all_refusals_are_the_same_but_for_the_request_id(keyed: Gateway) -> None:
    bodies = set()
    for method, path in (("POST", "/autocomplete"), ("GET", "/autocomplete"), ("GET", "/nothing"), ("PUT", "/")):
        response = keyed.client.simulate_request(method, path, headers={"X-Request-Id": "same"})
        bodies.add((response.status_code, response.content, response.headers["WWW-Authenticate"]))
    assert len(bodies) == 1
    assert bodies.pop()[0] == 401


@pytest.mark.parametrize("path", [*sorted(OPEN - STATIC), "/static/tercet.js", "/static/vendor/codemirror.js"])
def test_open_routes_are_read_without_a_key_and_with_a_wrong_one(keyed: Gateway, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer tct_wrong"}):
        assert keyed.client.simulate_get(path, headers=headers).status_code in {200, 503}
    assert keyed.client.simulate_post(path, body=b"{}").status_code == 401


def test_a_new_route_is_closed_until_it_is_listed(keyed: Gateway, key: str) -> None:
    class Everything(Echo):
        on_put = on_delete = on_patch = on_head = Echo.on_get

    keyed.app.add_route("/v2", Everything())
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"):
        assert keyed.client.simulate_request(method, "/v2", body=b"{}").status_code == 401
        response = keyed.client.simulate_request(method, "/v2", body=b"{}", headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200


def test_a_sink_and_static_files_of_the_framework_are_closed_too(keyed: Gateway, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("secret")
    keyed.app.add_static_route("/files", tmp_path / "files")
    keyed.app.add_sink(lambda req, resp, **_kwargs: None, prefix="/sink")
    for path in ("/files/a.txt", "/sink"):
        assert keyed.client.simulate_get(path).status_code == 401


def test_a_prefix_from_the_server_does_not_open_a_route(keyed: Gateway) -> None:
    for prefix in ("/health/live", "/static", "/autocomplete"):
        for path in ("/metrics", "/autocomplete"):
            environ: dict[str, Any] = {"SCRIPT_NAME": prefix}
            assert keyed.client.simulate_get(path, extras=environ).status_code == 401


@pytest.mark.parametrize(
    "host", ["localhost/health/live", "localhost?", "[::1]/", "127.0.0.1", "localhost:80", "", "*"]
)
def test_no_host_opens_a_route(make_echo: MakeGateway, key_path: Path, key: str, host: str) -> None:
    for hosts in ("notes.example", "*"):
        gateway = make_echo(keys=str(key_path), hosts=hosts)
        response = gateway.client.simulate_get("/metrics", headers={"Host": host})
        assert response.status_code in {401, 421}


@pytest.mark.parametrize(
    "header",
    [
        ("Authorization", "Bearer {key}"),
        ("Authorization", "bearer {key}"),
        ("Authorization", "BEARER   {key} "),
        ("api-key", "{key}"),
        ("x-api-key", "{key}"),
    ],
)
def test_the_headers_that_carry_a_key(keyed: Gateway, key: str, key_path: Path, header: tuple[str, str]) -> None:
    name, value = header
    response = keyed.client.simulate_get("/who", headers={name: value.format(key=key)})
    assert response.json == {"owner": read_keys(key_path)[0].id, "name": "first"}


def test_a_valid_key_counts_where_another_header_has_none(keyed: Gateway, key: str) -> None:
    for headers in (
        {"Authorization": "Basic dXNlcjpwYXNz", "api-key": key},
        {"Authorization": "Bearer x", "x-api-key": key},
        {"Authorization": f"Bearer {key}", "api-key": "x", "x-api-key": ""},
    ):
        assert keyed.client.simulate_get("/who", headers=headers).json["name"] == "first"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer tct_wrong",
        "Basic {key}",
        "{key}",
        "Bearer {key}x",
        "Bearer {upper}",
        "Bearer {digest}",
        "Bearer {id}",
        "Bearer \xff",
        "Bearer {key},{key}",
        "Bearer {key} {key}",
    ],
)
def test_anything_else_is_refused(keyed: Gateway, key: str, key_path: Path, value: str) -> None:
    [record] = read_keys(key_path)
    value = value.format(key=key, upper=key.upper(), digest=record.sha256, id=record.id)
    response = keyed.client.simulate_get("/who", headers={"Authorization": value})
    assert response.status_code == 401
    assert response.json["code"] == "unauthorized"
    assert key not in response.text


def test_a_query_or_a_body_carries_no_key(keyed: Gateway, key: str) -> None:
    response = keyed.client.simulate_post("/echo", params={"api-key": key, "key": key}, body=key.encode())
    assert response.status_code == 401


def test_the_answer_says_whether_a_key_was_sent(keyed: Gateway) -> None:
    missing = keyed.client.simulate_post("/autocomplete", body=b"{}").json["detail"]
    wrong = keyed.client.simulate_post("/autocomplete", body=b"{}", headers={"api-key": "x"}).json["detail"]
    assert "Authorization: Bearer <key>" in missing
    assert wrong == "This API key is unknown or revoked."


def test_without_a_key_file_no_key_is_needed_or_read(make_echo: MakeGateway) -> None:
    gateway = make_echo()
    gateway.app.add_route("/who", WhoAmI())
    assert gateway.client.simulate_get("/metrics").status_code == 200
    assert gateway.client.simulate_get("/who", headers={"x-api-key": "x"}).json == {"owner": "", "name": None}


def test_keys_are_checked_before_the_body_and_after_the_origin(keyed: Gateway, key: str) -> None:
    post = keyed.client.simulate_post
    coded = {"Content-Encoding": "br"}
    assert post("/echo", body=b"{}", headers=coded).status_code == 401
    assert post("/echo", body=b"{}", headers={**coded, "x-api-key": key}).status_code == 415
    assert post("/echo", headers={"Origin": "https://evil.example", "x-api-key": key}).status_code == 403
    assert post("/echo", headers={"Host": "evil.example", "x-api-key": key}).status_code == 421


def test_a_listed_page_may_read_a_refusal_and_needs_no_key_for_its_preflight(keyed: Gateway) -> None:
    origin = {"Origin": "https://notes.example"}
    refused = keyed.client.simulate_post("/autocomplete", body=b"{}", headers=origin)
    assert (refused.status_code, refused.headers["Access-Control-Allow-Origin"]) == (401, origin["Origin"])
    preflight = {"Access-Control-Request-Method": "POST"}
    for path in ("/autocomplete", "/nothing"):
        assert keyed.client.simulate_options(path, headers={**origin, **preflight}).status_code == 204
        assert keyed.client.simulate_options(path, headers=origin).status_code == 401
        assert keyed.client.simulate_options(path, headers=preflight).status_code == 401
        own = {"Origin": "http://localhost:8000", **preflight}
        assert keyed.client.simulate_options(path, headers=own).status_code == 401


def test_a_key_has_its_own_rate_and_open_routes_do_not_count(make_echo: MakeGateway, key_path: Path) -> None:
    limited, other = new_key(key_path, "limited", rate=3)[0], new_key(key_path, "other")[0]
    unlimited = new_key(key_path, "unlimited", rate=0)[0]
    gateway = make_echo(keys=str(key_path), key_rate="2")

    def statuses(key: str, path: str = "/echo") -> list[int]:
        headers = {"x-api-key": key}
        return [gateway.client.simulate_get(path, headers=headers).status_code for _ in range(5)]

    assert statuses(limited, "/health/live") == [200] * 5
    assert statuses(limited) == [200] * 3 + [429] * 2
    assert statuses(other) == [200] * 2 + [429] * 3
    assert statuses(unlimited) == [200] * 5
    response = gateway.client.simulate_get("/nothing", headers={"x-api-key": limited})
    assert (response.status_code, response.json["code"]) == (429, "quota_exceeded")
    assert 20 <= int(response.headers["Retry-After"]) <= 22


def test_the_request_log_names_the_key_by_its_id(
    keyed: Gateway, key: str, key_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keyed.client.simulate_post("/echo", body=b"{}", headers={"x-api-key": key}).status_code == 200
    assert keyed.client.simulate_post("/echo", body=b"{}", headers={"x-api-key": "wrong-key"}).status_code == 401
    text = capsys.readouterr().out
    assert read_keys(key_path)[0].id in text
    assert key not in text
    assert "wrong-key" not in text


def arrival(gateway: Gateway, line: str, *fields: str) -> tuple[Work, str]:
    """What is known of a request from its head."""
    found = gateway.app.admit(parse_head("\r\n".join([f"{line} HTTP/1.1", "Host: a", *fields, "", ""]).encode()))
    return found.work, found.owner


@pytest.mark.parametrize(
    ("line", "work"),
    [
        ("POST /autocomplete", Work.COMPLETIONS),
        ("POST /v1//completions/", Work.COMPLETIONS),
        ("POST /", Work.COMPLETIONS),
        ("POST /tools/tercet/generate?x=1", Work.COMPLETIONS),
        ("GET /", Work.READS),
        ("OPTIONS /autocomplete", Work.READS),
        ("POST /tokenize", Work.TOKENIZING),
        ("POST /%74okenize", Work.TOKENIZING),
        ("POST //tokenize/", Work.TOKENIZING),
        ("POST http://localhost:8000/tokenize", Work.TOKENIZING),
        ("POST /tools/tercet/tokenize", Work.TOKENIZING),
        ("GET /tokenizer_info", Work.TOKENIZING),
        ("POST /feedback", Work.FEEDBACK),
        ("GET /health/live", Work.HEALTH),
        ("HEAD /ping/", Work.HEALTH),
        ("GET /jobs/abc/def", Work.READS),
        ("GET /metrics", Work.READS),
        ("GET /autocomplete/x", Work.READS),
    ],
)
def test_a_request_has_the_class_of_the_route_that_answers_it(make_gateway: MakeGateway, line: str, work: Work) -> None:
    gateway = make_gateway(public_url="http://localhost/tools/tercet")
    for slot in range(3):
        gateway.admission.update(slot, State(state="warm"))
    assert arrival(gateway, line) == (work, "")


def test_a_completion_that_is_to_be_a_job_is_of_the_class_of_jobs(gateway: Gateway) -> None:
    gateway.admission.update(0, State(state="warm"))
    assert arrival(gateway, "POST /autocomplete", "Prefer: wait=3, respond-async")[0] is Work.JOBS
    assert arrival(gateway, "POST /autocomplete", "Prefer: wait=3")[0] is Work.COMPLETIONS


@pytest.mark.parametrize("field", ["Authorization: Bearer {}", "API-Key:{}", "x-api-key: {}"])
def test_a_key_is_checked_from_the_head(keyed: Gateway, key: str, key_path: Path, field: str) -> None:
    assert arrival(keyed, "POST /feedback", field.format(key)) == (Work.FEEDBACK, read_keys(key_path)[0].id)
    with pytest.raises(Unauthorized):
        arrival(keyed, "POST /feedback", field.format(key + "2"))
    with pytest.raises(Unauthorized):
        arrival(keyed, "POST /feedback")
    assert arrival(keyed, "GET /docs") == (Work.READS, "")


def test_a_completion_that_would_be_refused_is_refused_from_its_head(gateway: Gateway) -> None:
    for slot in range(3):
        gateway.admission.update(slot, State(state="failed", reason="no such file"))
    with pytest.raises(NotReady):
        arrival(gateway, "POST /autocomplete")
    assert arrival(gateway, "GET /autocomplete")[0] is Work.READS
    gateway.app.cancel_all(ShuttingDown("The server is shutting down."))
    with pytest.raises(ShuttingDown):
        arrival(gateway, "POST /v1/completions")
