"""API keys: every route needs one unless it is listed as open, however its path is written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import falcon
import pytest
from falcon import inspect
from structlog.testing import capture_logs

from gateway.entrance import Entrance
from gateway.middleware.origins import Origins
from gateway.routes import READY_PATHS
from gateway.server.request_parser import Request, parse_head
from gateway.server.served_app import ARRIVAL, Arrival, Work
from gateway.server.wsgi import make_environ
from shared.api_keys import new_key, read_keys
from shared.errors import NotReady, QuotaExceeded, ShuttingDown, Unauthorized
from shared.protocol import State
from shared.settings import LimitSettings, Settings
from tests.bad_requests import HttpRequest, call_app
from tests.gateway.clock import Clock
from tests.gateway.conftest import Gateway, MakeGateway
from tests.gateway.exposition import samples
from tests.gateway.middleware.conftest import Echo

STATIC = {"/static/{name}", "/static/vendor/{name}"}
OPEN = {"/", *STATIC, "/service_worker.js", "/docs", "/openapi.json", "/health/live", *READY_PATHS}
MB = "Content-Length: 1048576"
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
    gateway = make_echo(keys=str(key_path), public_url="https://notes.example/tools/tercet")
    gateway.app.add_route("/who", WhoAmI())
    return gateway


def routes(gateway: Gateway) -> list[str]:
    """Every URI template of the router, with a value for its fields."""
    return [route.path.replace("{name}", "tercet.js") for route in inspect.inspect_routes(gateway.app)]


def spellings(path: str) -> Iterator[str]:
    """A path and other ways to write it, as a client would to reach it around a check of the text."""
    rest = path[1:]
    yield from (path, f"{path}/", f"/{path}", f"//{path}", path.upper(), path.title(), f"{path}%2f", f"/%2f{rest}")
    yield from ("/" + rest.replace("/", slash) for slash in ("%2f", "%252f", "\\"))
    yield "/" + "".join(f"%{ord(letter):02x}" for letter in rest)
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


@pytest.mark.parametrize(
    ("line", "fields", "status"),
    [
        *[(line, [], 401) for line in ("POST /autocomplete", "GET //slots/", "GET /jobs/a", "PUT /", "POST /v1/x")],
        *[(f"GET /tools/{path}", ["x-api-key: tct_wrong"], 401) for path in ("/tercet/metrics", "tercet//slots", "x")],
        *[(f"POST /{path}", ["Content-Encoding: br"], 401) for path in ("v1/completions", "generate", "", "nothing")],
        ("OPTIONS /autocomplete", ["Origin: https://notes.example"], 401),
        ("OPTIONS /", ["Origin: https://notes.example", "Access-Control-Request-Method: GET", MB], 401),
        *[("POST /generate", [field, "{key}"], 403) for field in ("Origin: https://evil.example", "Origin: null")],
        *[(f"{method}/jobs", ["{key}"], 421) for method in ("GET http://a", "POST http://localhost.example:8000")],
        ("POST /v1/completions", ["{key}"], 503),
    ],
)
def test_the_server_refuses_a_request_by_its_head_as_the_app_would(
    keyed: Gateway, key: str, line: str, fields: list[str], status: int
) -> None:
    fields = [field.format(key=f"x-api-key: {key}") for field in ["X-Request-Id: same", *fields]]
    head = parse_head("\r\n".join([f"{line} HTTP/1.1", "Host: localhost", *fields, "", ""]).encode())
    keyed.app.cancel_all(ShuttingDown("The server is shutting down."))
    arrival = keyed.app.admit(head, ("127.0.0.1", 80))
    assert arrival.refusal is not None
    environ = {**make_environ(Request(head, b"", False), "http", None, ("", 0), ("", 0)), ARRIVAL: arrival}
    found = []
    for answer in (partial(keyed.app, environ), partial(keyed.app.refuse, head, arrival.refusal)):
        start_response, counts = Mock(), samples(keyed.metrics, "tercet_requests_total")
        with capture_logs() as lines:
            body = b"".join(answer(start_response))
        answered, headers = start_response.call_args.args[:2]
        headers = {name.lower(): value for name, value in headers}
        assert headers.pop("server-timing").startswith("total;dur=")
        counted = samples(keyed.metrics, "tercet_requests_total").items() - counts.items()
        found.append((answered, headers, body, [{**each, "ms": 0} for each in lines], len(counted)))
    assert found[0] == found[1]
    assert found[0][0].startswith(f"{status} ")


@pytest.mark.parametrize("path", [*sorted(OPEN - STATIC), "/static/tercet.js", "/static/vendor/codemirror.js"])
def test_open_routes_are_read_without_a_key_and_with_a_wrong_one(keyed: Gateway, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer tct_wrong"}):
        assert keyed.client.simulate_get(path, headers=headers).status_code in {200, 503}
    assert keyed.client.simulate_post(path, body=b"{}").status_code == 401


def test_what_is_not_listed_is_closed(keyed: Gateway, key: str, tmp_path: Path) -> None:
    class Everything(Echo):
        on_put = on_delete = on_patch = on_head = Echo.on_get

    keyed.app.add_route("/v2", Everything())
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"):
        assert keyed.client.simulate_request(method, "/v2", body=b"{}").status_code == 401
        response = keyed.client.simulate_request(method, "/v2", body=b"{}", headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("secret")
    keyed.app.add_static_route("/files", tmp_path / "files")
    keyed.app.add_sink(lambda req, resp, **_kwargs: None, prefix="/sink")
    for path in ("/files/a.txt", "/sink"):
        assert keyed.client.simulate_get(path).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer {}"},
        {"Authorization": "bearer {}"},
        {"Authorization": "BEARER   {} "},
        {"api-key": "{}"},
        {"x-api-key": "{}"},
        # A valid key counts where another header has none.
        {"Authorization": "Basic dXNlcjpwYXNz", "api-key": "{}"},
        {"Authorization": "Bearer x", "x-api-key": "{}"},
        {"Authorization": "Bearer {}", "api-key": "x", "x-api-key": ""},
    ],
)
def test_the_headers_that_carry_a_key(keyed: Gateway, key: str, key_path: Path, headers: dict[str, str]) -> None:
    headers = {name: value.format(key) for name, value in headers.items()}
    owner = read_keys(key_path)[0].id
    assert keyed.client.simulate_get("/who", headers=headers).json == {"owner": owner, "name": "first"}
    fields = [f"{name}: {value}" for name, value in headers.items()]
    assert arrival(keyed, "POST /feedback", *fields) == (Work.READS, owner)  # before its body has arrived


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
    sent = {"headers": {"Authorization": value}, "params": {"api-key": key, "key": key}, "body": key.encode()}
    response = keyed.client.simulate_post("/who", **sent)
    assert (response.status_code, response.json["code"]) == (401, "unauthorized")
    has_key = value.startswith("Bearer ") and bool(value[7:].strip())
    assert ("is unknown or revoked" if has_key else "Authorization: Bearer <key>") in response.json["detail"]
    assert key not in response.text
    with pytest.raises(Unauthorized):
        arrival(keyed, "POST /feedback", f"Authorization: {value}")


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
    rates = {"limited": 3, "other": None, "unlimited": 0}
    keys = {name: new_key(key_path, name, rate=rate)[0] for name, rate in rates.items()}
    gateway = make_echo(keys=str(key_path), key_rate="2")

    def statuses(name: str, path: str = "/echo") -> list[int]:
        headers = {"x-api-key": keys[name]}
        return [gateway.client.simulate_get(path, headers=headers).status_code for _ in range(5)]

    assert statuses("limited", "/health/live") == [200] * 5
    assert statuses("limited") == [200] * 3 + [429] * 2
    assert statuses("other") == [200] * 2 + [429] * 3
    assert statuses("unlimited") == [200] * 5
    response = gateway.client.simulate_get("/nothing", headers={"x-api-key": keys["limited"]})
    assert (response.status_code, response.json["code"]) == (429, "quota_exceeded")
    assert 20 <= int(response.headers["Retry-After"]) <= 22


def is_admitted(gateway: Gateway, line: str, *fields: str, client: object = ("10.0.0.1", 80)) -> bool:
    refusal = admit(gateway, line, *fields, client=client).refusal
    assert refusal is None or isinstance(refusal, QuotaExceeded)
    return refusal is None


@pytest.mark.parametrize(
    ("line", "fields", "num_admitted"),
    [
        # Four of the largest bodies, whatever the route.
        ("POST /feedback", [MB] * 9, 4),
        ("POST /nothing", [MB] * 9, 4),
        ("GET /docs", [MB] * 9, 4),
        ("POST /health/live", [MB] * 9, 4),
        # One that is too long is not read, so it counts as the smallest request: 2 KiB.
        ("POST /feedback", ["Content-Length: 1048577"] * 2100, 2048),
        ("GET /docs", ["X: y"] * 2100, 2048),
        ("POST /feedback", ["Transfer-Encoding: chunked"] * 2100, 2048),
        # 128 KiB each.
        *[(line, ["Prefer: respond-async"] * 40, 32) for line in ("GET /metrics", "POST /autocomplete")],
        # To refuse a probe takes as long as to answer it.
        ("GET /health/ready", ["X: y"] * 2100, 2100),
        # A text to tokenize weighs more, and the largest is taken from a full bucket.
        ("POST /tokenize", ["Content-Length: 40960"] * 3, 2),
        ("POST /tokenize", ["Content-Length: 40"] * 2100, 2048),
        ("POST /tokenize", [MB] * 2, 1),
    ],
)
def test_an_address_has_a_bucket_of_bytes_and_is_refused_from_the_head(
    make_gateway: MakeGateway, line: str, fields: list[str], num_admitted: int
) -> None:
    gateway = make_gateway(bytes_per_s="1")
    admitted = [is_admitted(gateway, line, field) for field in fields]
    assert admitted == [True] * num_admitted + [False] * (len(fields) - num_admitted)
    assert is_admitted(gateway, line, MB, client=("10.0.0.2", 80))
    unlimited = make_gateway(bytes_per_s="0")
    assert all(is_admitted(unlimited, line, MB) for _ in range(9))


def test_a_body_in_chunks_counts_as_it_is_read(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(bytes_per_s="1")
    chunked = admit(gateway, "POST /feedback", "Transfer-Encoding: chunked")
    for _ in range(4 * 64 - 1):
        gateway.app.charge(chunked, 16 << 10)
    with pytest.raises(QuotaExceeded):
        gateway.app.charge(chunked, 16 << 10)


@pytest.mark.parametrize(
    ("num_bytes", "num_requests", "interval_s"),
    [
        # 64 writers at five keys a second; characters of one and of two bytes.
        (8192 + 200, 64 * 5 * 60, 1 / (64 * 5)),
        (2 * 8192 + 200, 64 * 5 * 60, 1 / (64 * 5)),
        # Batches of token ids, as large as bodies may be: 150,000 tokens, which no engine computes sooner.
        (1 << 20, 100, 0.25),
        (300_000, 10, 0.0),  # documents in a row
    ],
)
def test_the_default_refuses_no_usual_load(num_bytes: int, num_requests: int, interval_s: float) -> None:
    clock = Clock()
    origins = Origins(Settings.load({"TERCET_HOSTS": "*"}))
    entrance = Entrance(lambda _path: None, origins, None, LimitSettings(), Mock(), Mock(), Mock(), None, clock)
    for _ in range(num_requests):
        arrival = entrance.admit("POST", "/v1/completions", "HTTP/1.0", {"CONTENT_LENGTH": str(num_bytes)}, "")
        assert arrival.refusal is None
        clock.now += interval_s


def test_bytes_of_a_key_count_wherever_it_comes_from(make_gateway: MakeGateway, key_path: Path) -> None:
    a, b = (f"x-api-key: {new_key(key_path, name)[0]}" for name in ("a", "b"))
    gateway = make_gateway(bytes_per_s="1", keys=str(key_path))
    admitted = [is_admitted(gateway, "POST /feedback", MB, a, client=(f"10.0.0.{n}", 80)) for n in range(5)]
    assert admitted == [True] * 4 + [False]
    assert is_admitted(gateway, "POST /feedback", MB, b)


def admit(gateway: Gateway, line: str, *fields: str, client: object = "") -> Arrival:
    head = parse_head("\r\n".join([f"{line} HTTP/1.1", "Host: localhost", *fields, "", ""]).encode())
    return gateway.app.admit(head, client)


def arrival(gateway: Gateway, line: str, *fields: str, client: object = "") -> tuple[Work, str]:
    """What is known of a request from its head."""
    found = admit(gateway, line, *fields, client=client)
    if found.refusal is not None:
        raise found.refusal
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
        ("POST /%74okenize", Work.TOKENIZING),
        ("POST //tokenize/", Work.TOKENIZING),
        ("POST http://localhost:8000/tokenize", Work.TOKENIZING),
        ("POST /tools/tercet/tokenize", Work.TOKENIZING),
        ("GET /tokenizer_info", Work.TOKENIZING),
        ("GET /info", Work.TOKENIZING),
        ("POST /feedback", Work.READS),
        ("HEAD /ping/", Work.HEALTH),
        ("GET /jobs/abc/def", Work.READS),
        ("GET /autocomplete/x", Work.READS),
    ],
)
def test_a_request_has_the_class_of_the_route_that_answers_it(make_gateway: MakeGateway, line: str, work: Work) -> None:
    gateway = make_gateway(public_url="http://localhost/tools/tercet")
    gateway.admission.update(0, State(state="warm"))
    assert arrival(gateway, line, "Prefer: wait=3") == (work, "")
    is_job = work is Work.COMPLETIONS  # which is sent to be a job
    assert arrival(gateway, line, "Prefer: wait=3, respond-async")[0] is (Work.JOBS if is_job else work)


def test_the_owner_is_the_key_or_else_the_address(
    make_echo: MakeGateway, keyed: Gateway, key: str, key_path: Path
) -> None:
    """A key that is not needed is not read. Jobs, feedback and logs know owners by their keys only."""
    gateway, key_id = make_echo(), read_keys(key_path)[0].id
    for client, address in ((("10.0.0.1", 80), "10.0.0.1"), (("::1", 80, 0, 0), "::1"), ("", ""), (b"", "")):
        assert arrival(gateway, "GET /metrics", f"x-api-key: {key}", client=client)[1] == address
        assert arrival(keyed, "GET /docs", client=client)[1] == address
        assert arrival(keyed, "GET /docs", f"x-api-key: {key}", client=client)[1] == key_id
    gateway.app.add_route("/who", WhoAmI())
    assert gateway.client.simulate_get("/who", headers={"x-api-key": key}).json == {"owner": "", "name": None}


def test_a_completion_that_would_be_refused_is_refused_from_its_head(gateway: Gateway) -> None:
    for slot in range(3):
        gateway.admission.update(slot, State(state="failed", reason="no such file"))
    with pytest.raises(NotReady, match="no such file"):
        arrival(gateway, "POST /autocomplete")
    assert arrival(gateway, "GET /autocomplete")[0] is Work.READS
    gateway.app.cancel_all(ShuttingDown("The server is shutting down."))
    with pytest.raises(ShuttingDown):
        arrival(gateway, "POST /v1/completions")
