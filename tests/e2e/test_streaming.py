"""Streamed answers, read by real clients, directly and through nginx."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import httpx_sse
import pytest

from tests.e2e.harness import Tercet
from workers.text.typography import PLAIN, Typography

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


CURLY = "“I don’t know what you mean,” she said. “It’s only a dream—and he’s gone… You’d almost"


def test_text_after_curly_marks_is_that_for_straight_ones_in_the_spelling_of_the_writer(tercet: Tercet) -> None:
    """The served model does not know them. tests/workers/test_respelling.py has the other fields and raw prompts."""
    plain = Typography(PLAIN).plain
    events = stream(tercet.client, CURLY, seed=9, length=48)
    sentences = events[-1][1]["sentences"]
    expected, straight = (tercet.ask(each, seed=9, length=48)["sentences"] for each in (CURLY, plain(CURLY)))
    assert [one["value"] for one in sentences] == [one["value"] for one in expected]
    assert [plain(one["value"]) for one in expected] == [one["value"] for one in straight]
    for sentence in sentences:
        assert not {*"\"'"} & {*sentence["value"]}
        assert texts(events)[sentence["seed"] - 9] == sentence["value"]


def test_branches_arrive_interleaved_and_long_before_the_end(slow: Tercet) -> None:
    with httpx_sse.connect_sse(
        slow.client, "POST", "/autocomplete", json={"context": OPENING, "stream": True, "length": 40}
    ) as source:
        assert source.response.headers["content-type"] == "text/event-stream"
        times = [(time.monotonic(), event.json()["branch"]) for event in source.iter_sse() if event.event == "token"]
        end = time.monotonic()
    assert {branch for _, branch in times[:6]} == {0, 1, 2}
    assert end - times[0][0] > 0.5 * 40 * 0.02


def test_proxies_pass_every_stream_of_events_on_as_it_is(tercet: Tercet) -> None:
    """Every route that declares events: what compresses an answer holds them back, unless it has `no-transform`."""
    document = tercet.client.get("/openapi.json").json()
    streaming = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "text/event-stream" not in operation["responses"].get("200", {}).get("content", {}):
                continue
            example = next(iter(operation["requestBody"]["content"]["application/json"]["examples"].values()))
            with tercet.client.stream(method.upper(), path, json={**example["value"], "stream": True}) as answer:
                headers = answer.headers
            assert headers["content-type"] == "text/event-stream", path
            assert {"no-store", "no-transform"} <= set(re.split(r"\s*,\s*", headers["cache-control"])), path
            assert headers["x-accel-buffering"] == "no", path
            streaming.add(path)
    assert streaming >= {"/autocomplete", "/v1/completions", "/", "/generate", "/generate_stream"}
