"""Streamed answers, read by real clients, directly and through nginx."""

from __future__ import annotations

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import httpx_sse
import pytest

from tests.e2e.harness import Tercet, until
from tests.e2e.test_cancelling import in_flight
from tests.nginx import nginx

pytestmark = pytest.mark.quick
OPENING = "The old man looked at the sea and"
Event = tuple[str, dict[str, Any]]


def stream(client: httpx.Client, context: str = OPENING, **fields: Any) -> list[Event]:
    with httpx_sse.connect_sse(
        client, "POST", "/autocomplete", json={"context": context, "stream": True, **fields}
    ) as source:
        return [(event.event, event.json()) for event in source.iter_sse()]


def texts(events: list[Event]) -> dict[int, str]:
    """The concatenated text deltas of each branch."""
    found: dict[int, str] = {}
    for name, data in events:
        if name == "token":
            found[data["branch"]] = found.get(data["branch"], "") + data["text"]
    return found


def test_a_stream_carries_the_same_answer(tercet: Tercet) -> None:
    for seed in range(10):
        events = stream(tercet.client, seed=seed)
        name, done = events[-1]
        assert name == "done"
        assert done["sentences"] == without_times(tercet.ask(seed=seed)["sentences"], done["sentences"])
        sentences = {data["branch"]: data["value"] for name, data in events if name == "sentence"}
        sent = texts(events)
        assert sorted(sentences.values()) == sorted(sentence["value"] for sentence in done["sentences"])
        assert all(sent[branch] == value for branch, value in sentences.items())


def without_times(sentences: list[dict[str, Any]], like: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`sentences` with the times, slots and cached tokens of `like`."""
    names = ("time", "slot", "cached_tokens", "queue_ms", "prefill_ms", "decode_ms")
    return [
        {**sentence, **{name: other[name] for name in names}} for sentence, other in zip(sentences, like, strict=True)
    ]


def test_branches_arrive_interleaved_and_long_before_the_end(slow: Tercet) -> None:
    with httpx_sse.connect_sse(
        slow.client, "POST", "/autocomplete", json={"context": OPENING, "stream": True, "length": 40}
    ) as source:
        assert source.response.headers["content-type"] == "text/event-stream"
        times = [(time.monotonic(), event.json()["branch"]) for event in source.iter_sse() if event.event == "token"]
        end = time.monotonic()
    assert {branch for _, branch in times[:6]} == {0, 1, 2}
    assert end - times[0][0] > 0.5 * 40 * 0.02


def test_the_format_follows_the_sse_standard(tercet: Tercet) -> None:
    """Each event is an `event` line, a `data` line with JSON, and an empty line."""
    body = tercet.client.post("/autocomplete", json={"context": OPENING, "stream": True}).text
    assert body.endswith("\n\n")
    for block in body[:-2].split("\n\n"):
        event, data = block.split("\n")
        assert event.startswith("event: ")
        assert data.startswith("data: ")
        json.loads(data.removeprefix("data: "))


def test_refusals_come_before_the_stream(tercet: Tercet) -> None:
    response = tercet.client.post("/autocomplete", json={"context": "a", "stream": True, "model_size": "xl"})
    assert (response.status_code, response.json()["code"]) == (422, "unknown_model")


def test_a_newer_request_of_a_session_cancels_the_stream(slow: Tercet) -> None:
    with ThreadPoolExecutor() as pool, httpx.Client(base_url=slow.url, trust_env=False, timeout=60) as client:
        older = pool.submit(stream, client, session="s", length=256)
        until(lambda: in_flight(slow) == 3, 5, "the older request in the engine")
        newer = slow.ask(session="s", length=5)
        name, problem = older.result(timeout=2)[-1]
    assert (name, problem["code"]) == ("error", "superseded")
    assert newer["sentences"]
    assert in_flight(slow) == 0


def test_a_closed_stream_frees_its_sequences(slow: Tercet) -> None:
    with httpx_sse.connect_sse(
        slow.client, "POST", "/autocomplete", json={"context": OPENING, "stream": True, "length": 256}
    ) as source:
        events = source.iter_sse()
        next(events)
        assert in_flight(slow) == 3
    gone = time.monotonic()
    until(lambda: in_flight(slow) == 0, 5, "its sequences freed")
    print(f"freed after {1e3 * (time.monotonic() - gone):.0f} ms")
    lines = until(
        lambda: [line for line in slow.events("request_finished") if line["route"] == "/autocomplete"], 5, "its line"
    )
    assert lines


def test_the_time_limit_ends_the_stream_with_what_is_ready(slow: Tercet) -> None:
    slow.ask()
    start = time.monotonic()
    events = stream(slow.client, length=256, max_time=1.5)
    assert time.monotonic() - start < 2.5
    name, done = events[-1]
    assert name == "done", done
    assert done["partial"]
    sent = texts(events)
    assert sorted(sent.values()) == sorted(sentence["value"] for sentence in done["sentences"])
    assert all(re.search(r"\w[^\w\s]*$", sentence["value"]) for sentence in done["sentences"])


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed (apt-get install nginx-light)")
def test_a_stream_survives_nginx(slow: Tercet, short_tmp_path: Path) -> None:
    with (
        nginx(short_tmp_path, slow.port) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
    ):
        start = time.monotonic()
        with httpx_sse.connect_sse(
            client, "POST", "/autocomplete", json={"context": OPENING, "stream": True, "length": 40, "seed": 1}
        ) as source:
            times, events = [], []
            for event in source.iter_sse():
                times.append(time.monotonic() - start)
                events.append((event.event, event.json()))
        assert events[-1][0] == "done"
        assert times[-1] - times[0] > 0.5 * 40 * 0.02  # not all at once, at the end
        assert [sentence["value"] for sentence in events[-1][1]["sentences"]] == [
            sentence["value"] for sentence in slow.ask(length=40, seed=1)["sentences"]
        ]
        assert client.get("/health/ready").status_code == 200
