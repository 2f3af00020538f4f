"""What is kept of a worker's state and of its sentences: known names and a bounded length, because names become labels
of metrics. Pure; knows no HTTP."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shared.metrics import COUNTERS
from shared.protocol import ENGINE_FAILURES, FINISH_REASONS, State

# Characters of a worker's sentence that are kept.
MAX_DETAIL_CHARS = 500
# Of each label of `shared.metrics.COUNTERS`. What a newer worker may count besides is UNKNOWN.
_COUNTER_LABELS: Mapping[str, frozenset[str]] = {
    "finish_reason": FINISH_REASONS | {"cancelled", "error"},
    "kind": ENGINE_FAILURES,
    "outcome": frozenset({"succeeded", "failed"}),
}
UNKNOWN = "unknown"


def usable_state(state: State) -> State:
    """A state with known counters only, because their names become labels of metrics, and a reason of bounded length.

    Counts of kinds that this gateway does not know are added up as UNKNOWN; other unknown counters are left out.
    """
    counters: dict[str, float] = {}
    for key, count in state.counters.items():
        name, _, label = key.partition(".")
        if name not in COUNTERS:
            continue
        if (label_name := COUNTERS[name][1]) is None:
            key = name
        elif label not in _COUNTER_LABELS[label_name]:
            key = f"{name}.{UNKNOWN}"
        counters[key] = counters.get(key, 0.0) + count
    return msgspec.structs.replace(state, counters=counters, reason=state.reason and shortened(state.reason))


def shortened(text: str) -> str:
    """A worker's sentence, for logs and clients."""
    return text if len(text) <= MAX_DETAIL_CHARS else f"{text[:MAX_DETAIL_CHARS]}…"
