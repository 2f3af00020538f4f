"""The gateway as a source of suggestions: which failures are repeated."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deploy.bench.quality import sources
from shared.errors import StartError


@contextmanager
def gateway(*statuses: int) -> Iterator[int]:
    """Answers with these statuses in turn, then with 200. Its port."""
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            data = json.dumps({"sentences": [{"value": " sea"}]}).encode()
            self.send_response(left.pop(0) if left else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads = True
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield listener.server_port
        listener.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "RETRY_WAITS_S", (0.0, 0.0))


def test_a_busy_gateway_is_asked_again() -> None:
    with gateway(503, 429) as port:
        source = sources.GatewaySource(port, {})
        assert source.suggest("the", 0).suggestions == (" sea",)
        source.close()


@pytest.mark.parametrize("statuses", [(400,), (503, 503, 503)])
def test_a_request_without_an_answer_ends_the_run(statuses: tuple[int, ...]) -> None:
    with gateway(*statuses) as port:
        source = sources.GatewaySource(port, {})
        with pytest.raises(StartError, match=str(statuses[0])):
            source.suggest("the", 0)
        source.close()
