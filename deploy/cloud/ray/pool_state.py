"""What an ingress knows of the pool: the reports of all workers and of all ingresses, one `State` made of them, and
which worker remembers a document.

Pure: knows neither Ray nor HTTP, and is given the time.

Ray takes 10 s and more to find that a node is gone, and until then its workers look idle. Workers report twice a
second, so this finds it within two.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from shared.protocol import SlotState, State

# No branch is sent to a worker that has been silent for this time, as long as others are not.
SILENCE_S = 2.0
# Workers report twice a second, ingresses once. After this time without a report it does not count.
REPORT_SILENCE_S = 5.0
# Longer than Ray takes to find that a worker is gone.
MEMORY_S = 300.0
# The pool's state is the first of these that a worker has, so it is warm as soon as one worker is.
_PRECEDENCE: tuple[SlotState, ...] = ("warm", "loading", "starting", "failed", "draining", "down")


class IngressLoad(Struct, frozen=True):
    """What an ingress serves: state streams, each of one gateway, and branches that workers have accepted."""

    num_streams: int = 0
    num_running: int = 0


class PoolState:
    """The latest reports. Not thread-safe but for `is_silent`."""

    def __init__(self) -> None:
        self._workers: dict[str, tuple[float, State]] = {}
        self._ingresses: dict[str, tuple[float, IngressLoad]] = {}

    def report_worker(self, replica_id: str, state: State, now: float) -> None:
        if state.state == "down":
            self._workers.pop(replica_id, None)
        else:
            self._workers[replica_id] = (now, state)

    def report_ingress(self, replica_id: str, load: IngressLoad, now: float) -> None:
        self._ingresses[replica_id] = (now, load)

    def is_silent(self, replica_id: str, now: float, limit_s: float = SILENCE_S) -> bool:
        """Whether a worker has reported before, and not for `limit_s`."""
        report = self._workers.get(replica_id)
        return report is not None and now - report[0] > limit_s

    def silent(self, now: float) -> frozenset[str]:
        """The workers that are silent now."""
        return frozenset(name for name in self._workers if self.is_silent(name, now))

    def state(self, model: str, now: float) -> State:
        """The pool as one slot: `max_batch`, `in_flight` and `num_replicas` count the warm workers."""
        self._forget(now)
        states = [state for at, state in self._workers.values() if now - at <= REPORT_SILENCE_S]
        merged = merge(states) if states else State(state="starting", model=model, num_replicas=0)
        return replace(merged, num_gateways=sum(load.num_streams for _, load in self._ingresses.values()))

    def is_full(self, now: float) -> bool:
        """Whether the ingresses together run as many branches as the warm workers compute, silent ones left out."""
        self._forget(now)
        responsive = (state for at, state in self._workers.values() if now - at <= SILENCE_S)
        max_batch = sum(state.max_batch for state in responsive if state.state == "warm")
        return 0 < max_batch <= sum(load.num_running for _, load in self._ingresses.values())

    def _forget(self, now: float) -> None:
        reports: dict[str, tuple[float, Any]]
        for reports, memory_s in ((self._workers, MEMORY_S), (self._ingresses, REPORT_SILENCE_S)):
            for replica_id in [name for name, (at, _) in reports.items() if now - at > memory_s]:
                del reports[replica_id]


# Serve makes the router itself, in the process of the ingress, and passes it nothing: both find this here.
POOL = PoolState()


def merge(states: Sequence[State]) -> State:
    """One state for workers of a model, at least one: sums of what adds up, a mean of the time per token."""
    warm = [state for state in states if state.state == "warm"]
    counted = warm or list(states)
    first = min(counted, key=lambda state: _PRECEDENCE.index(state.state))
    counters: Counter[str] = Counter()
    for state in states:
        counters.update(state.counters)
    return replace(
        first,
        # Workers with different weights do not compute the same: such a pool is a revision of its own.
        revision=_joined(state.revision for state in counted),
        device=_joined(state.device for state in counted),
        progress=max(state.progress for state in counted),
        max_batch=sum(state.max_batch for state in warm),
        in_flight=sum(state.in_flight for state in warm),
        num_replicas=len(warm),
        ms_per_token=sum(state.ms_per_token for state in counted) / len(counted),
        memory_bytes=sum(state.memory_bytes for state in states),
        pid=0,
        age=0,
        counters=dict(counters),
    )


def _joined(names: Iterable[str]) -> str:
    return "+".join(sorted(set(names)))


def preferred(key: str, names: Iterable[str]) -> str:
    """The name that remembers `key`: the one with the highest hash of both (rendezvous hashing).

    Every process finds the same one without asking. When the n-th worker comes or goes, 1/n of the documents move.

    Raises:
        ValueError: there are no names.
    """
    return max(names, key=lambda name: hashlib.blake2b(f"{key} {name}".encode(), digest_size=8).digest())
