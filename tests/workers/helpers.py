"""What several test modules of the worker share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

EMBEDDED = Path(__file__).parents[2] / "workers/checkpoints/embedded"
PATIENCE_S = 240.0  # the first start on a machine compiles the kernels


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does; fails rather than hangs."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)
