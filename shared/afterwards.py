"""What nobody waits for, done when nobody is held up by it: log lines, above all.

A line takes a fifth of a millisecond of the interpreter, and the threads of a process share one: written at once,
the lines of one branch stand in front of the answers of the others.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import structlog

# Three branches that end together are answered within this.
PAUSE_S = 0.003
log = structlog.get_logger()


class Afterwards:
    """One thread that does things a moment later, in their order; what is left is done when the process ends."""

    def __init__(self) -> None:
        self._things: deque[Callable[[], object]] = deque()
        self._is_wanted = threading.Event()
        self._doing = threading.Lock()
        threading.Thread(target=self._run, name="afterwards", daemon=True).start()
        atexit.register(self.finish)

    def do(self, function: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Returns at once. What the call raises is logged."""
        self._things.append(partial(function, *args, **kwargs))
        self._is_wanted.set()

    def finish(self) -> None:
        """Returns when all is done that was to be done."""
        with self._doing:
            while self._things:
                _do(self._things.popleft())

    def _run(self) -> None:
        while True:
            self._is_wanted.wait()
            self._is_wanted.clear()
            time.sleep(PAUSE_S)
            self.finish()


def _do(thing: Callable[[], object]) -> None:
    try:
        thing()
    except Exception as error:  # the next thing is to be done all the same
        log.error("unknown_error", exc_info=error)
