"""The gateway's Prometheus metrics. The lowest layer of the gateway: it knows neither pool nor generation.

Slots' own metrics are derived from their last states, which the pool supplies through a callable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from shared.metrics import LogCollector, SlotCollector
from shared.protocol import State
from shared.version import tercet_version

# About two buckets per octave from 5 ms: whether a suggestion is used is decided between 50 ms and 1 s.
_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)

NO_ROUTE = "(none)"  # the label of what was refused before it was routed

# Prometheus' own text format has no times of creation: they would be series that nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics of one gateway process, in a registry of its own. Thread-safe."""

    def __init__(self, slot_states: Callable[[], Mapping[int, State]], num_waiting: Callable[[], int]) -> None:
        """
        Args:
            slot_states: the slots' states by index; called at each scrape.
            num_waiting: branches that wait for room; called at each scrape.
        """
        self._registry = CollectorRegistry()
        self._registry.register(SlotCollector(lambda: slot_states().items()))
        self._registry.register(LogCollector())
        build = Gauge("tercet_build_info", "1; the labels say what runs", ["version"], registry=self._registry)
        build.labels(tercet_version()).set(1)
        counter = partial(Counter, registry=self._registry)
        self.requests = counter("tercet_requests", "Requests answered", ["route", "status"])
        self.seconds = Histogram(
            "tercet_request_seconds", "Time to answer", ["route"], buckets=_BUCKETS_S, registry=self._registry
        )
        self.branches = counter(
            "tercet_branches", "Branch calls by outcome: ok, or the error code", ["slot", "outcome"]
        )
        self.retries = counter("tercet_branch_retries", "Branch calls that were repeated")
        self.refused_retries = counter(
            "tercet_branch_retries_refused", "Branches that failed because the retry budget was exhausted"
        )
        self.refused_requests = counter(
            "tercet_refused_requests", "Requests refused without being started, by error code", ["reason"]
        )
        self.suggestions = counter(
            "tercet_suggestions",
            "Suggestions by action (shown, or the feedback), strategy, rank and time to answer",
            ["action", "strategy", "rank", "within_s"],
        )
        self.saved_characters = counter(
            "tercet_saved_characters", "Characters of accepted suggestions", ["strategy", "rank", "within_s"]
        )
        self.kept_characters = counter(
            "tercet_kept_characters",
            "Characters of accepted suggestions that were reported as still there later",
            ["strategy", "rank"],
        )
        self.predictions = counter(
            "tercet_predictions",
            "Suggestions of the strategy predict by action (shown, the feedback, or kept: reports of kept characters)"
            " and usefulness, at most up_to_keys",
            ["action", "up_to_keys"],
        )
        self.prediction_saved_characters = counter(
            "tercet_prediction_saved_characters", "Characters of accepted predictions by usefulness", ["up_to_keys"]
        )
        self.prediction_kept_characters = counter(
            "tercet_prediction_kept_characters",
            "Characters of accepted predictions that were reported as still there later, by usefulness",
            ["up_to_keys"],
        )
        self.jobs = counter("tercet_jobs", "Jobs by event", ["event"])
        waiting = Gauge("tercet_waiting_branches", "Branches that wait for room in a slot", registry=self._registry)
        waiting.set_function(num_waiting)

    def watch_server(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        """Export gauges of the server process: text and function by name, without the prefix `tercet_gateway_`."""
        for name, (text, value) in gauges.items():
            Gauge(f"tercet_gateway_{name}", text, registry=self._registry).set_function(value)

    def watch_jobs(self, num_open: Callable[[], int]) -> None:
        """Export the number of jobs that are queued or running."""
        Gauge("tercet_open_jobs", "Jobs that are queued or running", registry=self._registry).set_function(num_open)

    def answer_times(self, routes: Collection[str]) -> tuple[list[float], list[int]]:
        """What `tercet_request_seconds` has counted for the routes together.

        Returns:
            The buckets' upper bounds in seconds, without infinity, and for each how many answers took no longer; the
            number of all answers is the last.
        """
        counts = dict.fromkeys((*_BUCKETS_S, float("inf")), 0)
        for sample in next(iter(self.seconds.collect())).samples:
            if sample.name.endswith("_bucket") and sample.labels["route"] in routes:
                counts[float(sample.labels["le"])] += int(sample.value)
        return list(_BUCKETS_S), list(counts.values())

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
