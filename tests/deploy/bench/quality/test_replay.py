"""`tercet bench replay`: a record is repeated, what varies is left out, and every other difference is reported."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.bench.quality import replay
from shared.errors import StartError

PROSE = replay.PROSE.read_text(encoding="utf-8")


@contextmanager
def server(suffix: str = "") -> Iterator[str]:
    """Answers with the request's seed and `suffix`; ids, times and cache hits differ each time."""
    count = iter(range(10**6))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(self._answer(body))
            if body.get("stream"):
                delta = json.dumps({"branch": 0, "text": "a" + suffix})
                answer = f"event: token\ndata: {delta}\n\nevent: done\ndata: {answer}\n\n"
            data = answer.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
            number = next(count)
            sentence = {"value": f"{body['seed']}{suffix}", "time": number, "cached_tokens": number, "slot": number % 3}
            return {"id": str(number), "time": number, "sentences": [sentence]}

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()
        thread.join()


def test_equal_answers_do_not_differ_whatever_their_times(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with server() as url:
        assert replay.record(url, PROSE, ["embedded"], record) == 200
        assert replay.differences(url, record) == (200, [])


def test_every_other_answer_is_reported_with_its_kind(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with server() as url:
        replay.record(url, PROSE, ["embedded"], record)
    with server("!") as url:
        num_requests, different = replay.differences(url, record)
    assert (num_requests, len(different)) == (200, 200)
    assert different[1].startswith("request 1, streamed (embedded): ")


def test_requests_are_of_every_kind_for_every_model() -> None:
    made = replay.requests(PROSE, ["small", "medium"])
    assert made == replay.requests(PROSE, ["small", "medium"])
    kinds = {request.kind for request in made}
    assert len(kinds) == 32
    assert len({json.dumps(request.body) for request in made}) == 200


def test_an_unreadable_record_and_a_missing_server_are_named(tmp_path: Path) -> None:
    (tmp_path / "record").write_text("{")
    with pytest.raises(StartError, match="cannot be read"):
        replay.differences("http://127.0.0.1:9", tmp_path / "record")
    with pytest.raises(StartError, match="No answer from"):
        replay.record("http://127.0.0.1:9", PROSE, ["embedded"], tmp_path / "new")
