"""The cancellation of work that others wait for. Knows neither the work nor who ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from shared.errors import TercetError

# Makes a context manager from a function that cancels some work; it is entered while the work is done.
Cancelling: TypeAlias = Callable[[Callable[[], None]], AbstractContextManager[None]]


class Cancellation:
    """Whether some work is cancelled, and who must know when it is. Thread-safe.

    Attributes:
        cancel_reason: the error to answer with, if cancellation gave a reason.
    """

    def __init__(self) -> None:
        self.cancel_reason: TercetError | None = None
        self._changed = threading.Condition()
        self._is_cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self, reason: TercetError | None = None) -> None:
        """End the work. Of several reasons the first is kept."""
        with self._changed:
            if self.cancel_reason is None and not self._is_cancelled:
                self.cancel_reason = reason
            self._is_cancelled = True
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        for callback in callbacks:
            callback()

    @contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """While the block runs, cancellation calls `callback`; at once, if it has come already."""
        with self._changed:
            self._callbacks.append(callback)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            callback()
        try:
            yield
        finally:
            with self._changed:
                self._callbacks.remove(callback)

    def pause(self, seconds: float) -> None:
        """Sleep; cancellation ends it early."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled, timeout=seconds)
