"""The share of one core that work beside the decoding of completions takes: part by part, with a pause after each."""

from __future__ import annotations

# A decode step is as slow as its slowest thread, so a step that shares a core with the work takes at most
# 1 / (1 - 0.25) = 1.33 times as long; 2 is promised (R28).
SHARE = 0.25


def pause_after(busy_s: float) -> float:
    """How many seconds to pause after a part that took `busy_s` seconds, so that the work takes `SHARE` of a core."""
    return busy_s * (1 - SHARE) / SHARE
