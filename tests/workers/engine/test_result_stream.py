"""Delivery of tokens to a reader: batched when they follow quickly, complete, and readable again at the end."""

from __future__ import annotations

import pytest

from workers.engine import sequence
from workers.engine.request import GeneratedToken, SequenceOutput
from workers.engine.sequence import MAX_DELIVERY_DELAY_S, NUM_DELIVERED_SINGLY, ResultStream

END = SequenceOutput((), (), "length", cached_tokens=0, queue_ms=0, prefill_ms=0, decode_ms=0)


class Clock:
    """Time for the stream under test, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sequence, "time", clock)
    return clock


def token(number: int) -> GeneratedToken:
    return GeneratedToken(number, -1.0)


def delivered(stream: ResultStream) -> list[list[int | str]]:
    """What the reader can have now, one list for each delivery."""
    batches: list[list[int | str]] = [[]]
    while (output := stream.next(0)) is not None:
        batches[-1].append(output.token_id if isinstance(output, GeneratedToken) else output.finish_reason)
        if isinstance(output, SequenceOutput):
            return batches
        if not stream.has_more:
            batches.append([])
    return batches[:-1]


def test_tokens_in_quick_succession_are_delivered_in_growing_batches(clock: Clock) -> None:
    stream = ResultStream()
    for number in range(17):
        stream.deliver(token(number))
    singles = [[number] for number in range(NUM_DELIVERED_SINGLY)]
    assert delivered(stream) == [*singles, [4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]


def test_a_token_is_delayed_no_longer_than_the_maximum_if_another_follows(clock: Clock) -> None:
    stream = ResultStream()
    for number in range(NUM_DELIVERED_SINGLY + 1):
        stream.deliver(token(number))
    assert delivered(stream) == [[0], [1], [2], [3]]
    clock.now += MAX_DELIVERY_DELAY_S
    stream.deliver(token(5))
    assert delivered(stream) == [[4, 5]]


def test_the_result_is_delivered_at_once_with_what_is_pending(clock: Clock) -> None:
    stream = ResultStream()
    for number in range(6):
        stream.deliver(token(number))
    stream.deliver(END)
    assert delivered(stream) == [[0], [1], [2], [3], [4, 5, "length"]]
    assert stream.next(0) is END
    assert stream.result() is END


def test_cancel_calls_back_once_and_not_after_the_end() -> None:
    calls: list[int] = []
    stream = ResultStream(on_cancel=lambda: calls.append(1))
    stream.cancel()
    stream.cancel()
    assert (stream.is_cancelled, calls) == (True, [1])
    ended = ResultStream(on_cancel=lambda: calls.append(2))
    ended.deliver(END)
    ended.result()
    ended.cancel()
    assert (ended.is_cancelled, calls) == (False, [1])
