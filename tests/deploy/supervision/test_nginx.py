"""`deploy/supervision/nginx.conf` in a real nginx: what it passes on, whom it refuses, and how.

The upstream is a server that answers with what it got: nginx's part does not depend on the gateway. A test of
compose.yaml's service has a real gateway.
"""

from __future__ import annotations

import json
import queue
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.harness import ROOT, free_port
from tests.e2e.shared_servers import SharedServer
from tests.gateway.pool.helpers import Server, port_of, respond, sends, serving_requests
from tests.nginx import nginx
from tests.programs import run_program
from tests.tls import Certificate

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="apt-get install nginx-light")
# Addresses of this machine that the configuration treats as foreign.
FOREIGN, CROWDED = "127.0.0.2", "127.0.0.3"

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
arrivals: queue.SimpleQueue[bytes] = queue.SimpleQueue()
is_over, may_end = threading.Event(), threading.Event()


def echo(connection: socket.socket, request: bytes) -> None:
    """Answer with the request's path and headers; a path with `hold` waits for the end of the test. `/stream` is a
    response as Tercet streams it, whose second event waits for `may_end`."""
    line, *headers = request.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    path = line.split()[1]
    if path == "/stream":
        sends(HEAD, b"Content-Type: text/event-stream\r\nX-Accel-Buffering: no\r\n\r\n", b"data: 1\n\n")(connection)
        may_end.wait(10)
        connection.sendall(b"data: 2\n\n")
        return
    if "hold" in path:
        arrivals.put(request)
        is_over.wait(10)
    fields = {name.lower(): value for name, _, value in (header.partition(": ") for header in headers)}
    respond(connection, 200, json.dumps({"path": path, **fields}).encode(), {"Content-Type": "application/json"})


@pytest.fixture(scope="module")
def upstream() -> Iterator[int]:
    with serving_requests(echo) as server:
        yield port_of(server)
        is_over.set()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, upstream: int) -> Iterator[str]:
    changes = {"limit_conn tercet_connections 512": "limit_conn tercet_connections 4"}
    with nginx(tmp_path_factory.mktemp("nginx"), upstream, changes) as port:
        yield f"http://127.0.0.1:{port}"


def client(address: str = "127.0.0.1") -> httpx.Client:
    """A client whose requests come from an address of this machine."""
    return httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=10)


def assert_problem(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["request_id"] == response.headers["x-request-id"]
    assert ("retry-after" in response.headers) == (status in {429, 503, 504})


def test_host_and_key_are_passed_on_and_a_request_id_is_added(proxy: str) -> None:
    with client() as http:
        headers = {"Host": "tercet.example:8443", "Authorization": "Bearer tct_a", "X-Api-Key": "tct_b"}
        got = http.get(f"{proxy}/a?b=%20c", headers=headers).json()
    assert got["path"] == "/a?b=%20c"
    assert (got["host"], got["authorization"], got["x-api-key"]) == ("tercet.example:8443", "Bearer tct_a", "tct_b")
    assert len(got["x-request-id"]) == 32


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/slots", "/metrics/", "//metrics", "/%6detrics", "/static/../slots", "/metrics?a", "/slots%2f"],
)
def test_figures_of_the_machine_are_for_the_machine_only(proxy: str, path: str) -> None:
    with client() as ours, client(FOREIGN) as foreign:
        assert_problem(foreign.get(proxy + path), 403, "forbidden")
        assert ours.get(proxy + path).status_code == 200
        assert foreign.get(f"{proxy}/health/ready").status_code == 200


def test_an_address_with_too_many_connections_is_refused_and_others_are_not(proxy: str) -> None:
    with client(CROWDED) as crowded, client(FOREIGN) as other, ThreadPoolExecutor(4) as threads:
        held = [threads.submit(crowded.get, f"{proxy}/hold") for _ in range(4)]
        for _ in held:
            arrivals.get(timeout=10)
        assert_problem(crowded.get(f"{proxy}/a"), 429, "quota_exceeded")
        assert other.get(f"{proxy}/a").status_code == 200
        is_over.set()
        assert [future.result().status_code for future in held] == [200] * 4
        is_over.clear()


def test_an_office_behind_one_address_is_within_the_limits() -> None:
    """64 writers, each with six connections, five requests a second and feedback on one of two."""
    text = (ROOT / "deploy/supervision/nginx.conf").read_text()
    patterns = (r"rate=(\d+)r/s", r"burst=(\d+)", r"tercet_connections (\d+);")
    rate, burst, connections = (int(re.findall(pattern, text)[0]) for pattern in patterns)
    assert rate >= 64 * 5 * 1.5
    assert burst >= 2 * rate
    assert connections >= 64 * 6


def test_a_stream_is_passed_on_event_by_event(proxy: str) -> None:
    with client() as http, http.stream("GET", f"{proxy}/stream") as response:
        events = response.iter_lines()
        assert next(events) == "data: 1"
        may_end.set()  # only now: a proxy that buffers would still wait
        assert [line for line in events if line] == ["data: 2"]


def test_nginxs_own_errors_are_problem_json(proxy: str) -> None:
    with client() as http:
        assert_problem(http.post(proxy, content=b"x" * (2 << 20) + b"x"), 413, "body_too_large")
        assert_problem(http.get(f"{proxy}/{'x' * 40_000}"), 414, "url_too_long")
        assert_problem(http.get(proxy, headers={"X-Long": "x" * 40_000}), 431, "headers_too_large")
        assert_problem(http.get(proxy, headers={"Host": "a b"}), 400, "malformed_request")


def test_a_gateway_that_is_away_is_answered_503(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with nginx(tmp_path, unused.getsockname()[1]) as port, client() as http:
            assert_problem(http.get(f"http://127.0.0.1:{port}/"), 503, "not_ready")


def test_it_listens_on_loopback_only(proxy: str) -> None:
    """A server that listens on all addresses of the machine answers at 127.0.0.2 too."""
    with client() as http:
        assert http.get(f"{proxy}/a").status_code == 200
        with pytest.raises(httpx.ConnectError):
            http.get(f"{proxy.replace('127.0.0.1', FOREIGN)}/a")


def test_compose_serves_https_with_this_configuration(server_with: Callable[..., SharedServer], tmp_path: Path) -> None:
    """The configuration that the service's command makes, and a completion through it."""
    tercet = server_with(hosts="tercet.lan")
    shell, option, script = yaml.safe_load((ROOT / "deploy/packaging/compose.yaml").read_text())["services"]["nginx"][
        "command"
    ]
    make, serve = script.replace("/etc/nginx/tercet.conf", str(ROOT / "deploy/supervision/nginx.conf")).splitlines()
    assert serve == "exec nginx -c /tmp/nginx.conf -g 'daemon off;'"
    subprocess.run([shell, option, make.replace("/tmp/nginx.conf", f"{tmp_path}/made.conf")], check=True)
    certificate = Certificate(tmp_path)
    port = free_port()
    changes = {
        "server tercet:8000": f"server 127.0.0.1:{tercet.port}",
        " 443 ssl": f" 127.0.0.1:{port} ssl",
        "/etc/tercet/fullchain.pem": str(certificate.cert),
        "/etc/tercet/privkey.pem": str(certificate.key),
    }
    text = (tmp_path / "made.conf").read_text()
    # Nothing but loopback of its own container may read the figures, and it listens at no other address.
    assert re.findall(r"^ +(listen|allow|deny) (.*);", text, re.MULTILINE) == [
        ("listen", "443 ssl http2"),
        ("allow", "127.0.0.1"),
        ("allow", "::1"),
        ("deny", "all"),
    ]
    with (
        nginx(tmp_path, tercet.port, changes, port, text),
        httpx.Client(verify=certificate.client(), trust_env=False, timeout=60) as http,
    ):
        checked = run_program(["nginx", "-t", "-c", f"{tmp_path}/nginx.conf"])
        assert "syntax is ok" in checked.stderr, checked.stderr
        context = certificate.client()
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
        ):
            assert encrypted.selected_alpn_protocol() == "h2"
        answer = http.post(
            f"https://127.0.0.1:{port}/autocomplete", json={"context": "The sea"}, headers={"Host": "tercet.lan"}
        )
        assert len(answer.json()["sentences"]) == 3, answer.text


# Several gateways ----------------------------------------------------------------------------


def name_the_gateway(connection: socket.socket, request: bytes) -> None:
    """Answer with the port of the gateway. A request whose header `X-Lose` names the port loses its connection."""
    port = b"%d" % connection.getsockname()[1]
    if b"X-Lose: " + port not in request:
        respond(connection, 200, port)


@contextmanager
def gateways(count: int) -> Iterator[dict[int, Server]]:
    """Servers by port."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving_requests(name_the_gateway)) for _ in range(count)]
        yield {port_of(server): server for server in servers}


AFFINITIES = [
    ("X-Session-Id", "s{}"),
    ("Authorization", "Bearer tct_{}"),
    ("x-api-key", "tct_{}"),
    ("api-key", "tct_{}"),
]


AFFINITY = "hash $tercet_affinity consistent"


def ingress_affinity() -> str:
    """The same directive for the NGINX Ingress Controller."""
    ingress = yaml.safe_load((ROOT / "deploy/cloud/kubernetes/components/gateways/ingress.yaml").read_text())
    return str(ingress["metadata"]["annotations"]["nginx.org/lb-method"])


@pytest.mark.parametrize("affinity", [AFFINITY, ingress_affinity()], ids=["nginx.conf", "ingress"])
def test_requests_of_a_session_or_a_key_stay_at_one_gateway(tmp_path: Path, affinity: str) -> None:
    with gateways(2) as servers, nginx(tmp_path, list(servers), {AFFINITY: affinity}) as port, client() as http:
        for name, value in AFFINITIES:
            homes = {}
            for number in range(20):
                headers = {name: value.format(number)}
                url = f"http://127.0.0.1:{port}/autocomplete"
                answers = {http.post(url, headers=headers).text for _ in range(3)}
                assert len(answers) == 1, (name, answers)
                homes[number] = answers.pop()
            assert len(set(homes.values())) == 2, name


def test_the_session_comes_before_the_key_and_the_address_last(tmp_path: Path) -> None:
    with gateways(2) as servers, nginx(tmp_path, list(servers)) as port, client() as http:
        for headers in ({"X-Session-Id": "s", "Authorization": "Bearer {}"}, {"User-Agent": "{}"}):
            sent = [{name: value.format(number) for name, value in headers.items()} for number in range(10)]
            assert len({http.get(f"http://127.0.0.1:{port}/", headers=each).text for each in sent}) == 1


def test_a_gateway_that_is_away_is_passed_by_and_no_request_fails(tmp_path: Path) -> None:
    with gateways(1) as servers, socket.socket() as unused, client() as http:
        unused.bind(("127.0.0.1", 0))
        with nginx(tmp_path, [*servers, unused.getsockname()[1]]) as port:
            url = f"http://127.0.0.1:{port}/jobs"  # also what may not be repeated: it was not sent
            answers = [http.post(url, headers={"X-Session-Id": f"s{number}"}) for number in range(20)]
    assert {(answer.status_code, answer.text) for answer in answers} == {(200, str(*servers))}


@pytest.mark.parametrize(
    ("method", "path", "is_repeated"),
    [
        ("POST", "/autocomplete", True),
        ("POST", "/v1/completions", True),
        ("POST", "/generate", True),
        ("POST", "/generate_stream", True),
        ("POST", "/v1/completions/", True),
        ("POST", "/", True),
        ("POST", "/feedback", True),
        ("GET", "/jobs/1", True),
        ("DELETE", "/jobs/1", True),
        ("POST", "/jobs", False),
        ("POST", "/invocations", False),
    ],
)
def test_what_a_gateway_lost_is_repeated_where_that_is_safe(
    tmp_path: Path, method: str, path: str, is_repeated: bool
) -> None:
    with gateways(2) as servers, nginx(tmp_path, list(servers)) as port, client() as http:
        url = f"http://127.0.0.1:{port}{path}"
        home = http.request(method, url, headers={"X-Session-Id": "s"}).text
        answer = http.request(method, url, headers={"X-Session-Id": "s", "X-Lose": home})
        if is_repeated:
            assert (answer.status_code, answer.text != home) == (200, True)
        else:
            assert_problem(answer, 503, "not_ready")
        # The first request, the one that was lost, and its repetition.
        assert sum(server.num_connections for server in servers.values()) == 2 + is_repeated
