"""Which plans `tercet tune` measures, in which order, and which one it recommends. Pure: decides on figures alone.

The search has three stages: workers and their threads, then placement, then `max_batch`, each with the best plan so
far. A plan is left out where a figure that was measured already says that it cannot win; the reason is kept. Then the
two best plans are measured again in turns, because one pass each may have been a lucky one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import get_args

from msgspec.structs import replace

from deploy.tuning.tune.results import MIB, Candidate, Measurement
from shared.setting_values import Placement
from shared.settings import PoolSettings

# Figures that differ by less are equal: rounds of one plan differ as much.
EQUAL_SHARE = 0.05
MAX_WORKERS_PER_GPU = 4
FINAL_PASSES = 3
# Share of the capacity. Nearer to it a queue takes longer to settle than an open loop lasts: for M/M/1 with service
# rate μ at utilisation ρ about 1 ÷ (μ · (1 - √ρ)²) (Abate and Whitt, "Transient behavior of the M/M/1 queue", 1987), so
# with 17 requests/s 3 s at 75 %, and 10 s at 85 %.
MAX_STABLE_SHARE = 0.75
DEFAULTS = PoolSettings()
Outcome = Measurement | str  # a string says why the plan could not be served


@dataclass(frozen=True, slots=True)
class Space:
    """What a search may choose from.

    Attributes:
        cores: number of cores that workers on the CPU may use; 0 where the devices are GPUs.
        memory_bytes: that the workers of one device may take together; None if unknown.
        max_clients: number of clients of the largest closed loop.
        num_samples: branches per request.
        max_workers: per device; None for the device's own bound.
    """

    devices: tuple[str, ...]
    cores: int
    memory_bytes: int | None
    max_clients: int
    num_samples: int
    max_workers: int | None = None

    def worker_counts(self) -> list[int]:
        """1, 2, 4, … per device: twice the cores at most, or what a GPU may have."""
        bound = self.max_workers or (2 * self.cores if self.cores else MAX_WORKERS_PER_GPU)
        return [*(2**power for power in range(bound.bit_length()) if 2**power < bound), bound]

    def thread_counts(self, workers: int) -> list[int]:
        """The cores divided among the workers, then fewer by halves."""
        if not self.cores:
            return [0]
        most = max(1, self.cores // workers)
        return list(dict.fromkeys(max(1, most >> power) for power in range(most.bit_length())))


@dataclass(frozen=True, slots=True)
class Goal:
    """What the recommended plan is for: an average latency to hold, a load to hold it at. Both may be absent."""

    slo_ms: float | None = None
    qps: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The recommended plan and why."""

    candidate: Candidate
    reason: str


class Search:
    """What to measure next, which follows from what was measured.

    Attributes:
        pruned: plans that are not measured → why.
    """

    def __init__(self, space: Space, outcomes: Mapping[Candidate, Outcome], goal: Goal) -> None:
        """
        Args:
            outcomes: those of the plans so far. Before `plans` goes on, that of its last plan must be there.
        """
        self._space, self._outcomes, self._goal = space, outcomes, goal
        self.pruned: dict[Candidate, str] = {}

    def plans(self) -> Iterator[tuple[str, Candidate]]:
        """The plans to measure, each with its stage, which is shown to the operator."""
        stages = {"Workers and threads": self._workers, "Placement": self._placements, "max_batch": self._batches}
        for stage, plans in stages.items():
            yield from ((stage, candidate) for candidate in plans() if candidate not in self._outcomes)
        while (final := next_final(self._outcomes, self._goal)) is not None:
            yield "The best two again", final

    def _workers(self) -> Iterator[Candidate]:
        space, outcomes, goal = self._space, self._outcomes, self._goal
        best_before: tuple[int, Measurement] | None = None
        stop = ""
        for workers in space.worker_counts():
            best: Measurement | None = None
            previous: Measurement | None = None
            for threads in space.thread_counts(workers):
                candidate = Candidate(space.devices, workers, threads, DEFAULTS.max_batch, DEFAULTS.placement)
                reason = stop or self._too_large(candidate)
                if not reason and previous and best and is_worse(previous, best):
                    reason = "fewer threads were worse already"
                if reason:
                    self.pruned[candidate] = reason
                    continue
                yield candidate
                outcome = outcomes[candidate]
                if isinstance(outcome, str):
                    stop = f"{workers} worker{'s' * (workers > 1)} cannot be served"
                    continue
                previous = outcome
                best = outcome if best is None or outcome.capacity_qps > best.capacity_qps else best
            if best is not None and best_before is not None and not stop:
                before, smaller = best_before
                if best.capacity_qps < (1 + EQUAL_SHARE) * smaller.capacity_qps:
                    stop = (
                        f"{workers} workers answered {best.capacity_qps:.1f} requests/s at most, {before} "
                        f"{smaller.capacity_qps:.1f}: more would share the same device"
                    )
            smaller_plans = {one: outcome for one, outcome in outcomes.items() if one.workers <= workers}
            if goal.slo_ms is not None and goal.qps is not None and choose(smaller_plans, goal) is not None:
                held = f"{workers} workers hold" if workers > 1 else "1 worker holds"
                stop = stop or f"{held} the SLO at this load; more would cost more"
            if best is not None:
                best_before = workers, best

    def _placements(self) -> Iterator[Candidate]:
        base = self._base()
        if base is None or base.num_workers == 1:
            return
        for placement in get_args(Placement):
            # Where the load always leaves a worker room for a whole request, auto packs, too.
            if placement != "pack" or self._space.num_samples * self._space.max_clients > base.max_batch:
                yield replace(base, placement=placement)

    def _batches(self) -> Iterator[Candidate]:
        base = self._base()
        if base is None:
            return
        num_sequences = self._space.num_samples * self._space.max_clients
        most = -(-num_sequences // base.num_workers)  # of a worker, at an even share
        larger = replace(base, max_batch=2 * base.max_batch)
        if most > base.max_batch:
            if reason := self._too_large(larger):
                self.pruned[larger] = reason
            else:
                yield larger
        smaller = max(self._space.num_samples, most // 2)
        if smaller < base.max_batch:
            yield replace(base, max_batch=smaller)

    def _base(self) -> Candidate | None:
        """The best plan so far, with the default batch, so that a stage's own results do not move it."""
        chosen = choose(self._outcomes, self._goal) or choose(self._outcomes, Goal())
        return None if chosen is None else replace(chosen.candidate, max_batch=DEFAULTS.max_batch)

    def _too_large(self, candidate: Candidate) -> str:
        """Why the plan does not fit into memory, by the largest worker that was measured; empty if it does."""
        measured = [outcome.worker_bytes for outcome in self._outcomes.values() if not isinstance(outcome, str)]
        free_bytes = self._space.memory_bytes
        if not measured or free_bytes is None or candidate.workers * max(measured) <= free_bytes:
            return ""
        return (
            f"memory: {candidate.workers} × {max(measured) / MIB:,.0f} MiB, measured per worker, are more than the "
            f"{free_bytes / MIB:,.0f} MiB that are free"
        )


def next_final(outcomes: Mapping[Candidate, Outcome], goal: Goal) -> Candidate | None:
    """Return which of the two best plans to measure again. None if all is done, or the second is worse in every way."""
    first = choose(outcomes, goal)
    if first is None:
        return None
    second = choose({candidate: outcomes[candidate] for candidate in outcomes if candidate != first.candidate}, goal)
    if second is None:
        return None
    best, other = outcomes[first.candidate], outcomes[second.candidate]
    if isinstance(best, str) or isinstance(other, str) or is_worse(other, best):
        return None
    if min(best.num_passes, other.num_passes) >= FINAL_PASSES:
        return None
    return second.candidate if other.num_passes < best.num_passes else first.candidate


def is_worse(one: Measurement, other: Measurement) -> bool:
    """Whether a plan has less capacity and a higher latency with one client."""
    return (
        one.capacity_qps < (1 - EQUAL_SHARE) * other.capacity_qps and one.light_ms > (1 + EQUAL_SHARE) * other.light_ms
    )


def choose(outcomes: Mapping[Candidate, Outcome], goal: Goal) -> Choice | None:
    """Return the plan to recommend, or None if none meets the goal.

    A load must leave a plan some of its capacity (`MAX_STABLE_SHARE`). With an SLO and a load: the cheapest plan
    (fewest workers, then fewest bytes) that held the SLO at that load without an error. With an SLO alone: the most
    requests per second within it. With a load alone: the lowest latency at it. With neither: the most requests per
    second. Plans within 5 % of the best are equal; of those, the one with the lower latency, then the cheapest, is
    chosen.
    """
    plans = {candidate: outcome for candidate, outcome in outcomes.items() if not isinstance(outcome, str)}
    if goal.qps is not None:
        return _choose_at_load(plans, goal.qps, goal.slo_ms)
    if goal.slo_ms is not None:
        rates = {candidate: highest_rate(plan, goal.slo_ms) for candidate, plan in plans.items()}
        plans = {candidate: plan for candidate, plan in plans.items() if rates[candidate] > 0}
        what = f"holds an average of {goal.slo_ms:g} ms up to"
    else:
        rates = {candidate: plan.capacity_qps for candidate, plan in plans.items()}
        what = "answers"
    if not plans:
        return None
    plans = _lowest(plans, {candidate: -rate for candidate, rate in rates.items()})
    num_equal = len(plans)
    plans = _lowest(plans, {candidate: plan.light_ms for candidate, plan in plans.items()})
    best = min(plans, key=lambda candidate: _cost(candidate, plans[candidate]))
    reason = f"{what} {rates[best]:.1f} requests/s, the most of the plans measured (within 5 %)"
    if num_equal > 1:
        reason += f"; of {num_equal} such plans it has a low latency with one client, then the least cost"
    return Choice(best, reason)


def _choose_at_load(plans: Mapping[Candidate, Measurement], qps: float, slo_ms: float | None) -> Choice | None:
    bound_ms = inf if slo_ms is None else slo_ms
    means_ms = {
        candidate: plan.at_load.mean_ms
        for candidate, plan in plans.items()
        if qps <= MAX_STABLE_SHARE * plan.capacity_qps and not plan.at_load.num_errors
    }
    plans = {candidate: plans[candidate] for candidate, mean_ms in means_ms.items() if mean_ms <= bound_ms}
    if not plans:
        return None
    if slo_ms is None:
        plans = _lowest(plans, means_ms)
    best = min(plans, key=lambda candidate: _cost(candidate, plans[candidate]))
    held = f"measured average {means_ms[best]:.0f} ms at {qps:g} requests/s"
    if slo_ms is None:
        return Choice(best, f"{held}, the lowest of the plans measured (within 5 %)")
    return Choice(best, f"{held}, within {slo_ms:g} ms, with the fewest workers and the least memory")


def highest_rate(plan: Measurement, slo_ms: float) -> float:
    """Return the most requests per second that a closed loop reached within an average of `slo_ms`; 0 if none did."""
    held_qps = max((row.qps for row in plan.closed if row.mean_ms <= slo_ms), default=0.0)
    return min(held_qps, MAX_STABLE_SHARE * plan.capacity_qps)


def _lowest(plans: Mapping[Candidate, Measurement], values: Mapping[Candidate, float]) -> dict[Candidate, Measurement]:
    """The plans whose value is within 5 % of the lowest."""
    bound = min((values[candidate] for candidate in plans), default=inf)
    bound += EQUAL_SHARE * abs(bound)
    return {candidate: plan for candidate, plan in plans.items() if values[candidate] <= bound}


def _cost(candidate: Candidate, plan: Measurement) -> tuple[int, int, bool, int, int]:
    """Workers, then bytes to the nearest 64 MiB, then how far it is from the defaults."""
    is_changed = (candidate.placement, candidate.max_batch) != (DEFAULTS.placement, DEFAULTS.max_batch)
    return candidate.num_workers, plan.total_bytes // (64 * MIB), is_changed, -candidate.max_batch, plan.total_bytes
