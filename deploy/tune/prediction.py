"""Predicts the average latency of a plan at a load from its latencies at other loads. Pure.

The model is the flow-equivalent server of queueing theory (Chandy, Herzog and Woo, 1975): closed loops measure how many
requests per second the plan completes while n are in the system, and Poisson arrivals at another rate then form a
birth-death process with these rates. Its mean does not depend on how service times are distributed as long as requests
share the server, as the rows of a batch do. What the model leaves out (an arrival's prefill delays the rows that
decode) is a ratio of measured to modelled latency, taken from the open loops that were measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from deploy.tune.results import Figures, Measurement

# More requests in the system than this have a probability that does not count, unless the load is at the capacity.
MAX_IN_SYSTEM = 5000
RATE_PRECISION = 1e-3


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Latency of one plan over its load.

    Attributes:
        closed: pairs of (requests in the system, average latency in ms), measured by closed loops, ascending.
        ratios: pairs of (requests per second, measured ÷ modelled latency), from open loops, ascending.
    """

    closed: tuple[tuple[float, float], ...]
    ratios: tuple[tuple[float, float], ...] = ()

    @classmethod
    def fit(cls, figures: Sequence[Figures]) -> LatencyModel:
        """The model of a plan with these figures; closed loops are required, open loops make it more exact."""
        closed = sorted(
            (float(row.load.clients), 1e3 * row.load.clients / row.qps) for row in figures if row.load.kind == "closed"
        )
        model = cls(tuple(closed))
        ratios = sorted(
            (row.load.rate_qps, row.mean_ms / modelled)
            for row in figures
            if row.load.kind == "open" and (modelled := model.open_ms(row.load.rate_qps)) < inf
        )
        return cls(model.closed, tuple(ratios))

    @property
    def capacity_qps(self) -> float:
        """Completed requests per second with as many in the system as were measured at most."""
        return self._rate(self.closed[-1][0])

    def open_ms(self, rate_qps: float) -> float:
        """Average latency under Poisson arrivals; infinite where they exceed the capacity."""
        if rate_qps >= self.capacity_qps:
            return inf
        # Probabilities of n in the system, up to a factor: p(n) = p(n-1) · arrivals ÷ completions at n.
        probability, total, mean = 1.0, 1.0, 0.0
        for number in range(1, MAX_IN_SYSTEM):
            probability *= rate_qps / self._rate(number)
            total += probability
            mean += number * probability
            if probability < 1e-12 * total:
                break
        modelled_ms = 1e3 * mean / total / rate_qps  # Little's law
        return modelled_ms * interpolate(self.ratios, rate_qps) if self.ratios else modelled_ms

    def highest_rate(self, slo_ms: float) -> float:
        """The most Poisson arrivals per second with an average latency of at most `slo_ms`; 0: not even one."""
        low, high = 0.0, self.capacity_qps
        if self.open_ms(RATE_PRECISION * high) > slo_ms:
            return 0.0
        while high - low > RATE_PRECISION * self.capacity_qps:
            middle = (low + high) / 2
            low, high = (middle, high) if self.open_ms(middle) <= slo_ms else (low, middle)
        return low

    def _rate(self, number: float) -> float:
        """Requests per second that are completed while `number` are in the system.

        Beyond the largest closed loop the rate stays as it was there: nothing was measured.
        """
        number = min(number, self.closed[-1][0])
        return 1e3 * number / interpolate(self.closed, number)


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between points with ascending x; the nearest point's value outside."""
    above = bisect_left(points, x, key=lambda point: point[0])
    if above in {0, len(points)}:
        return points[min(above, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def model_of(measurement: Measurement) -> LatencyModel:
    return LatencyModel.fit(measurement.figures)
