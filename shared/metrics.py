"""What a slot tells Prometheus. A worker exposes its own slot, the gateway all of them, in the same words.

Labels are slots, never process ids, so that a respawned worker continues its series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.protocol import SlotState, State

_GAUGES: list[tuple[str, str, Callable[[State], float]]] = [
    ("tercet_slot_in_flight_branches", "Branches in the slot's engine", lambda state: state.in_flight),
    ("tercet_slot_max_batch_branches", "Branches the slot computes at once", lambda state: state.max_batch),
    ("tercet_slot_token_seconds", "Time of one decode step, moving average", lambda state: state.ms_per_token / 1e3),
    ("tercet_slot_load_progress_ratio", "Share of the model's loading that is done", lambda state: state.progress),
    ("tercet_slot_generation", "Workers that the slot's master has started up to this one", lambda state: state.age),
]
_STATES: tuple[SlotState, ...] = ("starting", "loading", "warm", "draining", "failed", "down")

# Keys of `State.counters`; a key may carry a finish reason: "sequences.length".
COUNTERS = {
    "sequences": "Branches finished, by finish reason",
    "prompt_tokens": "Prompt tokens of finished branches",
    "cached_tokens": "Prompt tokens that had not to be computed again",
    "generated_tokens": "Tokens generated",
}


class SlotCollector(Collector):
    """Collects the slots' states at each scrape. `read` gives pairs of (slot index, state)."""

    def __init__(self, read: Callable[[], Iterable[tuple[int, State]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        states = [(str(index), state) for index, state in self._read()]
        family = GaugeMetricFamily("tercet_slot_state", "1 for the state that a slot is in", labels=["slot", "state"])
        for slot, state in states:
            for known in _STATES:
                family.add_metric([slot, known], float(state.state == known))
        yield family
        for name, text, value in _GAUGES:
            family = GaugeMetricFamily(name, text, labels=["slot"])
            for slot, state in states:
                family.add_metric([slot], value(state))
            yield family
        for key, text in COUNTERS.items():
            labels = ["slot", "finish_reason"] if key == "sequences" else ["slot"]
            counter = CounterMetricFamily(f"tercet_slot_{key}", text, labels=labels)
            for slot, state in states:
                for full_key, total in sorted(state.counters.items()):
                    kind, _, reason = full_key.partition(".")
                    if kind == key:
                        counter.add_metric([slot, reason] if reason else [slot], total)
            yield counter
