"""What `tercet tune` measures: a candidate plan, the loads that it was put under, and their figures. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

import msgspec
import numpy as np

from deploy.tuning.load.clients import LoadResult
from shared.errors import StartError
from shared.setting_values import Placement

MIB = 1 << 20


class Candidate(msgspec.Struct, frozen=True):
    """A plan that can be served: the settings that are tuned.

    Attributes:
        workers: number of workers on each device.
        threads: compute threads of each worker; 0 on a GPU, where the setting has no effect.
    """

    devices: tuple[str, ...]
    workers: int
    threads: int
    max_batch: int
    placement: Placement

    @property
    def num_workers(self) -> int:
        """Number of workers on all devices."""
        return self.workers * len(self.devices)

    def settings(self) -> dict[str, str]:
        """Settings by lower-case name, except the models."""
        threads = {"cpu_threads": str(self.threads)} if self.threads else {}
        return {
            "devices": ",".join(self.devices),
            **threads,
            "max_batch": str(self.max_batch),
            "placement": self.placement,
        }

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        per_device = f" on each of {len(self.devices)} devices" if len(self.devices) > 1 else ""
        threads = f" × {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return f"{workers}{threads}{per_device}, batch {self.max_batch}, {self.placement}"


class Load(msgspec.Struct, frozen=True):
    """A closed loop of `clients`, or an open loop with Poisson arrivals at `rate_qps`; the other is 0."""

    clients: int = 0
    rate_qps: float = 0.0

    def __str__(self) -> str:
        return f"{self.clients} client{'s' * (self.clients > 1)}" if self.clients else f"{self.rate_qps:.3g}/s, Poisson"


class Figures(msgspec.Struct, frozen=True):
    """The figures of one turn under a load, or the medians of several turns. Latencies are of answered requests.

    Attributes:
        num_errors: requests that were refused or failed.
        client_cpu_s: per second, of all clients together.
    """

    load: Load
    num_requests: int
    num_errors: int
    qps: float
    max_ms: float
    min_ms: float
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    client_cpu_s: float

    @classmethod
    def of(cls, load: Load, result: LoadResult) -> Figures:
        """
        Raises:
            StartError: no request was answered.
        """
        times = [reply.wall_ms for reply in result.replies if reply.status == 200]
        if not times:
            raise StartError(f"With {load} the server answered none of the requests.")
        figures = {
            "qps": len(times) / result.elapsed_s,
            "max_ms": max(times),
            "min_ms": min(times),
            "mean_ms": fmean(times),
            **{f"p{percent}_ms": float(np.percentile(times, percent)) for percent in (50, 90, 99)},
            "client_cpu_s": result.client_cpu_s / result.elapsed_s,
        }
        num_errors = len(result.replies) - len(times)
        return cls(load, len(times), num_errors, **{name: round(value, 3) for name, value in figures.items()})


def medians(rounds: Sequence[Figures]) -> Figures:
    """The medians over rounds of one load; requests and errors are summed."""
    sums = {name: sum(getattr(turn, name) for turn in rounds) for name in ("num_requests", "num_errors")}
    others = {
        name: round(median(getattr(turn, name) for turn in rounds), 3)
        for name in Figures.__struct_fields__
        if name not in {"load", *sums}
    }
    return Figures(rounds[0].load, **sums, **others)


class Measurement(msgspec.Struct, frozen=True):
    """A candidate that was served.

    Attributes:
        load_s: time from the fork of the first worker until all were warm.
        worker_bytes: memory of the largest worker after the load: PSS, or memory of its GPU.
        total_bytes: PSS of all processes, gateway and supervisor included.
        figures: one row for each load: the closed loops, then the open loop at the load to tune for, if there is one.
        num_passes: how often the candidate was served; of several passes, the other values are medians.
    """

    load_s: float
    worker_bytes: int
    total_bytes: int
    figures: tuple[Figures, ...]
    num_passes: int = 1

    def __str__(self) -> str:
        return (
            f"{self.capacity_qps:.1f} requests/s, {self.light_ms:.0f} ms with one client, "
            f"{self.worker_bytes / MIB:,.0f} MiB per worker, loaded in {self.load_s:.1f} s"
        )

    @property
    def closed(self) -> list[Figures]:
        return [row for row in self.figures if row.load.clients]

    @property
    def capacity_qps(self) -> float:
        """The most requests per second that any closed loop reached."""
        return max(row.qps for row in self.closed)

    @property
    def light_ms(self) -> float:
        """The average latency with the fewest clients."""
        return min(self.closed, key=lambda row: row.load.clients).mean_ms

    @property
    def at_load(self) -> Figures:
        """Figures of the open loop. Only where a load to tune for was given."""
        [row] = (row for row in self.figures if not row.load.clients)
        return row


def merged(passes: Sequence[Measurement]) -> Measurement:
    """One measurement of a candidate that was served several times: medians, and the most memory."""
    return Measurement(
        load_s=median(one.load_s for one in passes),
        worker_bytes=max(one.worker_bytes for one in passes),
        total_bytes=max(one.total_bytes for one in passes),
        figures=tuple(medians(rows) for rows in zip(*(one.figures for one in passes), strict=True)),
        num_passes=len(passes),
    )
