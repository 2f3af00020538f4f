"""Tokenizes texts beside the engine: one long text and one other at a time, so a short text waits for no long one.

Texts are encoded part by part, and one whose gateway has gone ends after the part. Knows neither HTTP nor the engine.
"""

from __future__ import annotations

import threading

from shared.errors import ClientGone, SlotFull
from shared.protocol import LONG_TEXT_CHARS, TokenizeResponse
from workers.codec import Codec


class TokenizingTurn:
    """The turn of one long text at a time, and of one that is not long. Thread-safe."""

    def __init__(self) -> None:
        self._locks = {is_long: threading.Lock() for is_long in (False, True)}  # each is held during a turn

    def take(self, codec: Codec, text: str) -> Tokenization:
        """
        Raises:
            SlotFull: another text of its kind has the turn. Waiting here would take the threads that branches need.
        """
        lock = self._locks[len(text) > LONG_TEXT_CHARS]
        if not lock.acquire(blocking=False):
            raise SlotFull("This worker tokenizes another text; send it again in a moment.")
        return Tokenization(codec, text, lock)


class Tokenization:
    """A text that has its turn. `close` it; `cancel` may be called from any thread."""

    def __init__(self, codec: Codec, text: str, turn: threading.Lock) -> None:
        self._codec = codec
        self._text = text
        self._turn = turn
        self._is_cancelled = threading.Event()
        self._is_closed = False

    def result(self) -> TokenizeResponse:
        """
        Raises:
            ClientGone: it was cancelled.
        """
        return self._codec.tokenize(self._text, after_part=self._check)

    def cancel(self) -> None:
        """End it after this part."""
        self._is_cancelled.set()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._turn.release()

    def _check(self) -> None:
        if self._is_cancelled.is_set():
            raise ClientGone("The gateway has closed the connection.")
