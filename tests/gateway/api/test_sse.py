"""Server-sent events: their encoding, and errors as a stream's last event."""

from __future__ import annotations

import json
from collections.abc import Iterator

import structlog

from gateway.api.error_formats import PROBLEM_DETAILS
from gateway.api.sse import EventStream, event


def test_an_event_has_a_line_of_its_name_one_of_data_and_ends_with_an_empty_line() -> None:
    assert event("token", {"text": "a"}) == b'event: token\ndata: {"text":"a"}\n\n'
    assert event(None, {"text": "a"}) == b'data: {"text":"a"}\n\n'


def test_line_ends_in_texts_are_escaped() -> None:
    raw = event("token", {"text": "a\n\nb\r"})
    name, data, *rest = raw.split(b"\n")
    assert (name, rest) == (b"event: token", [b"", b""])
    assert json.loads(data.removeprefix(b"data: ")) == {"text": "a\n\nb\r"}


def failing(error: Exception) -> Iterator[bytes]:
    yield event("token", {"text": "a"})
    raise error


def test_an_unexpected_exception_is_logged_and_its_event_is_generic() -> None:
    with structlog.testing.capture_logs() as logged:
        _, last = EventStream(failing(ZeroDivisionError("a secret")), PROBLEM_DETAILS, "r1", lambda: None)
    assert b"internal_error" in last
    assert b"r1" in last
    assert b"secret" not in last
    [line] = logged
    assert isinstance(line["exc_info"], ZeroDivisionError)


def test_closing_ends_the_request_also_before_the_first_event() -> None:
    closed: list[bool] = []
    EventStream(iter([]), PROBLEM_DETAILS, "r1", lambda: closed.append(True)).close()
    assert closed == [True]
