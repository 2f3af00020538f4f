"""Texts in a worker: one long one and one other at a time, at a bounded share of a core while its engine decodes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shared.cpu_share import SHARE
from shared.errors import ClientGone, SlotFull
from shared.protocol import LONG_TEXT_CHARS, TokenizeRequest, TokenizeResponse
from tests.e2e.harness import until
from tests.workers.slots import warm_service
from workers import tokenizing
from workers.tokenizing import MAX_PAUSE_S, TokenizingTurn

LONG_TEXT = "x" * (LONG_TEXT_CHARS + 1)
RESPONSE = TokenizeResponse(ids=[], texts=[], ends=[], n_ctx=8, eos_id=0)


class Codec:
    """A codec of texts with five parts, of which each takes a second by `Clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.num_parts = 0

    def tokenize(self, text: str, *, after_part: Any) -> TokenizeResponse:
        for number in range(5):
            self.num_parts += 1
            self._clock.now += 0.25
            after_part(is_last=number == 4)
        return RESPONSE


class Clock:
    """Monotonic time that passes only when a part is encoded, or an event is awaited."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Event(threading.Event):
    clock: Clock

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self.clock.now += timeout or 0.0
        return self.is_set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Event.clock = Clock()
    monkeypatch.setattr(tokenizing, "time", clock)
    return clock


def test_while_the_engine_decodes_a_text_takes_its_share(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share holds across texts too: the pause after the last part delays the next text."""
    monkeypatch.setattr(threading, "Event", Event)
    codec, turn = Codec(clock), TokenizingTurn(lambda: True)
    for _ in range(4):
        text = turn.take(codec, "text")  # type: ignore[arg-type]
        assert text.result() == RESPONSE
        text.close()
    busy_s = 0.25 * codec.num_parts
    assert busy_s / (clock.now + 0.25 * (1 - SHARE) / SHARE) == pytest.approx(SHARE)


def test_an_idle_engine_leaves_all_time_to_a_text(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Event", Event)
    codec = Codec(clock)
    TokenizingTurn(lambda: False).take(codec, "text").result()  # type: ignore[arg-type]
    assert clock.now == 0.25 * 5


def test_the_pause_after_a_part_that_took_long_is_bounded(clock: Clock) -> None:
    turn = TokenizingTurn(lambda: True)
    turn.pace(60.0)
    assert turn.pause_s == MAX_PAUSE_S


def test_a_second_text_is_refused_until_the_first_has_ended() -> None:
    """60 texts at once took the worker's threads, its memory and the interpreter."""
    with warm_service() as service:
        first = service.tokenize(TokenizeRequest(text="a"))
        with pytest.raises(SlotFull):
            service.tokenize(TokenizeRequest(text="b"))
        first.close()
        first.close()  # as a server that closes what has closed itself
        second = service.tokenize(TokenizeRequest(text="b"))
        assert second.result().ids
        with pytest.raises(SlotFull):
            service.tokenize(TokenizeRequest(text="c"))
        second.close()


def test_a_text_waits_for_no_long_one() -> None:
    """Three words waited for 1 MB, 2.5 s in a worker that decodes."""
    with warm_service() as service:
        long = service.tokenize(TokenizeRequest(text=LONG_TEXT))
        with pytest.raises(SlotFull):
            service.tokenize(TokenizeRequest(text=LONG_TEXT))
        short = service.tokenize(TokenizeRequest(text="a"))
        assert short.result().ids
        short.close()
        assert takes_turn(service)
        long.close()
        assert not takes_turn(service)


def test_a_text_ends_when_its_gateway_has_gone() -> None:
    with warm_service() as service:
        text = service.tokenize(TokenizeRequest(text="The old man looked at the sea. " * 100_000))
        ended: list[BaseException] = []

        def compute() -> None:
            try:
                text.result()
            except ClientGone as error:
                ended.append(error)
            finally:
                text.close()

        thread = threading.Thread(target=compute)
        thread.start()
        text.cancel()
        thread.join()
        assert len(ended) == 1
        until(lambda: not takes_turn(service), 1, "the turn is free")


def takes_turn(service: Any) -> bool:
    try:
        service.tokenize(TokenizeRequest(text=LONG_TEXT)).close()
    except SlotFull:
        return True
    return False
