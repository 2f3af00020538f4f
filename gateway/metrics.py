"""What the gateway counts, in Prometheus' words. Slots' own figures come with their state streams."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.pool.admission import Admission
from shared.metrics import SlotCollector

# Two per octave from 5 ms: suggestions are won or lost between 50 ms and a second.
_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)


class Metrics:
    """All metrics of one gateway process."""

    def __init__(self, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(SlotCollector(lambda: enumerate(admission.states())))
        self.requests = Counter("tercet_requests", "Requests answered", ["route", "status"], registry=self._registry)
        self.seconds = Histogram(
            "tercet_request_seconds", "Time to answer", ["route"], buckets=_SECONDS, registry=self._registry
        )
        self.branches = Counter(
            "tercet_branches", "Branch calls by outcome (ok, or a failure's code)", ["slot", "outcome"],
            registry=self._registry,
        )  # fmt: skip
        self.suggestions = Counter(
            "tercet_suggestions", "Suggestions shown, and what was done with them, by rank and by the answer's time",
            ["action", "rank", "within_s"], registry=self._registry,
        )  # fmt: skip
        self.saved_characters = Counter(
            "tercet_saved_characters", "Characters of accepted suggestions", ["rank", "within_s"],
            registry=self._registry,
        )  # fmt: skip
        waiting = Gauge("tercet_waiting_branches", "Branches that wait for room", registry=self._registry)
        waiting.set_function(lambda: admission.num_waiting)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
