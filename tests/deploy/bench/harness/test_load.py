"""The cheap closed-loop clients, against a server that counts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deploy.bench.harness.load import LoadClients
from deploy.load.workload import Subject
from shared.errors import StartError
from workers.checkpoints.resolve import resolve


class CountingServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.peers: set[int] = set()
        self.status = 200
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CountingServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.peers.add(self.client_address[1])
        self.send_response(self.server.status)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"te")
        self.wfile.write(b"xt")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def server() -> Iterator[CountingServer]:
    with CountingServer() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


def clients_of(server: CountingServer) -> LoadClients:
    subject = Subject.of(resolve("embedded"))
    return LoadClients("127.0.0.1", server.server_port, "/path", {"n": 3}, subject, 5, seed=1)


def test_each_client_sends_its_next_request_after_the_last_answer(server: CountingServer) -> None:
    clients = clients_of(server)
    clients.prepare(2)
    load = clients.send_for(3, 0.2)
    assert load.num_answers == len(server.bodies) > 3
    assert len(server.peers) == 3
    assert load.elapsed_s >= 0.2
    assert len({body["context"] for body in server.bodies}) == load.num_answers
    assert {body["n"] for body in server.bodies} == {3}


def test_an_answer_that_is_no_success_ends_the_run(server: CountingServer) -> None:
    server.status = 503
    with pytest.raises(StartError, match="503"):
        clients_of(server).send_for(1, 0.1)
