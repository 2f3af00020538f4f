"""Tokenizes texts beside the engine: one long text and one other at a time, at a bounded rate while the engine decodes.

Part after part of a text is encoded, and after each the thread pauses, so that the engine keeps its cores and the
interpreter. A short text so waits for no long one. Knows neither HTTP nor the engine; of that only whether it is busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shared.cpu_share import pause_after
from shared.errors import ClientGone, SlotFull
from shared.protocol import LONG_TEXT_CHARS, TokenizeResponse
from workers.codec import Codec

# A text without a place to split it at is encoded in one part, which takes long. Its pause ends with this.
MAX_PAUSE_S = 2.0


class TokenizingTurn:
    """The turn of one long text at a time, and of one that is not long. Thread-safe."""

    def __init__(self, is_engine_busy: Callable[[], bool]) -> None:
        self._is_engine_busy = is_engine_busy
        self._locks = {is_long: threading.Lock() for is_long in (False, True)}  # each is held during a turn
        self._free_at = 0.0  # when the next part may be encoded; the pause after a text delays the next text

    def take(self, codec: Codec, text: str) -> Tokenization:
        """
        Raises:
            SlotFull: another text of its kind has the turn. Waiting here would take the threads that branches need.
        """
        if not self._locks[len(text) > LONG_TEXT_CHARS].acquire(blocking=False):
            raise SlotFull("This worker tokenizes another text; send it again in a moment.")
        return Tokenization(self, codec, text)

    def release(self, text: str) -> None:
        self._locks[len(text) > LONG_TEXT_CHARS].release()

    def pace(self, busy_s: float) -> None:
        """Note that a part took `busy_s`."""
        pause_s = pause_after(busy_s) if self._is_engine_busy() else 0.0
        self._free_at = time.monotonic() + min(pause_s, MAX_PAUSE_S)

    @property
    def pause_s(self) -> float:
        """How long the next part has to wait."""
        return self._free_at - time.monotonic()


class Tokenization:
    """A text that has its turn. `close` it; `cancel` may be called from any thread."""

    def __init__(self, turn: TokenizingTurn, codec: Codec, text: str) -> None:
        self._turn = turn
        self._codec = codec
        self._text = text
        self._is_cancelled = threading.Event()
        self._is_closed = False
        self._began_at = 0.0

    def result(self) -> TokenizeResponse:
        """
        Raises:
            ClientGone: it was cancelled.
        """
        self._begin_part()
        return self._codec.tokenize(self._text, after_part=self._end_part)

    def cancel(self) -> None:
        """End it before the next part."""
        self._is_cancelled.set()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._turn.release(self._text)

    def _begin_part(self) -> None:
        if self._is_cancelled.wait(max(0.0, self._turn.pause_s)):
            raise ClientGone("The gateway has closed the connection.")
        self._began_at = time.monotonic()

    def _end_part(self, *, is_last: bool) -> None:
        self._turn.pace(time.monotonic() - self._began_at)
        if not is_last:
            self._begin_part()
