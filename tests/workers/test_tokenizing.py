"""Texts in a worker: one long one and one other at a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shared.errors import ClientGone, SlotFull
from shared.protocol import LONG_TEXT_CHARS, TokenizeRequest
from tests.e2e.harness import until
from tests.workers.slots import warm_service

LONG_TEXT = "x" * (LONG_TEXT_CHARS + 1)


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
