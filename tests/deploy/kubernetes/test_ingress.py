"""The ingress' directive in a real nginx, as F5's controller writes it into an upstream of pods."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.deploy.kubernetes.rendered import of_kind
from tests.deploy.needs import need
from tests.e2e.harness import free_port, until

NUM_PODS = 3
CONFIG = """
worker_processes 1;
error_log stderr;
pid {base}/nginx.pid;
daemon off;
events {{}}
http {{
    access_log off;
    client_body_temp_path {base};
    proxy_temp_path {base};
    fastcgi_temp_path {base};
    uwsgi_temp_path {base};
    scgi_temp_path {base};
    upstream tercet {{
        {method};
        {servers}
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://tercet; }}
    }}
}}
"""


class Name(BaseHTTPRequestHandler):
    """Stands for a gateway pod: answers with its port."""

    def do_GET(self) -> None:
        assert isinstance(self.server, HTTPServer)
        body = str(self.server.server_port).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def pods() -> Iterator[list[ThreadingHTTPServer]]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Name) for _ in range(NUM_PODS)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


def test_requests_of_a_session_reach_one_pod(tmp_path: Path, pods: list[ThreadingHTTPServer]) -> None:
    need("nginx-light:nginx")
    [ingress] = of_kind("overlays/gateways", "Ingress").values()
    method = ingress["metadata"]["annotations"]["nginx.org/lb-method"]
    port = free_port()
    servers = " ".join(f"server 127.0.0.1:{pod.server_address[1]};" for pod in pods)
    (tmp_path / "nginx.conf").write_text(CONFIG.format(base=tmp_path, method=method, servers=servers, port=port))
    with (
        subprocess.Popen(["nginx", "-c", tmp_path / "nginx.conf", "-p", tmp_path]) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):

        def pod_of(session: str | None) -> str:
            return client.get("/", headers={} if session is None else {"X-Session-Id": session}).text

        def answers() -> bool:
            try:
                return bool(pod_of(None))
            except httpx.TransportError:
                return False

        try:
            until(answers, 10, "nginx")
            first = {f"s{number}": pod_of(f"s{number}") for number in range(60)}
            assert len(set(first.values())) == NUM_PODS
            assert {session: pod_of(session) for session in first} == first
            # Without the header, requests are spread.
            assert len({pod_of(None) for _ in range(4 * NUM_PODS)}) == NUM_PODS
            # A pod that is gone takes only its own sessions along.
            gone = pods[0]
            gone.shutdown()
            gone.server_close()
            after = {session: pod_of(session) for session in first}
            kept = {session for session in first if first[session] != str(gone.server_address[1])}
            assert {session: after[session] for session in kept} == {session: first[session] for session in kept}
        finally:
            process.terminate()
