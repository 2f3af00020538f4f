"""What a measurement yields, and its file. Knows loads and times; does not know the model fitted to them."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from deploy.load.machine import Machine
from deploy.load.rounds import percentile
from shared.errors import StartError

SPAN_S = 0.5
Role = Literal["calibration", "check"]


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of load. Either `num_clients` (closed loop), `rate_qps` (open loop) or `num_writers` is set.

    Attributes:
        num_tokens: new tokens of each branch.
        keys_per_s: of each writer.
    """

    role: Role
    num_clients: int = 0
    rate_qps: float = 0.0
    num_writers: int = 0
    keys_per_s: float = 0.0
    num_tokens: int = 20
    seconds: float

    @property
    def name(self) -> str:
        if self.num_clients:
            return f"{self.num_clients} client{'s' * (self.num_clients > 1)}, {self.num_tokens} tokens"
        if self.num_writers:
            return f"{self.num_writers} writers at {self.keys_per_s:g} keys/s"
        return f"{self.rate_qps:g} requests/s"


class Span(msgspec.Struct, frozen=True):
    """`SPAN_S` of an open loop: the answers that arrived in it, and the CPU time of the pools."""

    num_answers: int
    cpu_s: float


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a load, measured or simulated.

    Attributes:
        round: counted from 0.
        offsets_s: of an open loop's arrivals.
        spans: of an open loop.
        wall_ms: of the answers with status 200.
        engine_ms: of the same answers, as they report it; empty if simulated.
        num_superseded: requests that a newer one of their session ended.
        gateway_cpu_s, workers_cpu_s, client_cpu_s: CPU time of the pools and of the clients.
        others_share: of all cores, that other processes used.
    """

    round: int = 0
    offsets_s: list[float] = []
    spans: list[Span] = []
    wall_ms: list[float]
    engine_ms: list[float] = []
    num_superseded: int = 0
    num_failed: int = 0
    elapsed_s: float
    gateway_cpu_s: float = 0.0
    workers_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    others_share: float = 0.0

    @property
    def answers_per_s(self) -> float:
        return len(self.wall_ms) / self.elapsed_s

    @property
    def cpu_s_per_answer(self) -> float:
        """Of the pools."""
        return (self.gateway_cpu_s + self.workers_cpu_s) / len(self.wall_ms)

    def speeds(self, cpu_s_per_answer: float) -> list[float]:
        """Of the cores in each span, relative to cores on which an answer takes the pools this CPU time.

        A shared machine has no constant speed: others use the same caches and the same physical cores, which shows as
        CPU time only.
        """
        own_s = self.cpu_s_per_answer
        return [
            cpu_s_per_answer / (span.cpu_s / span.num_answers if span.num_answers and span.cpu_s else own_s)
            for span in self.spans
        ]


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """A load and its turns, one for each round."""

    plan: LoadPlan
    turns: list[Turn]

    def median_ms(self, share: float) -> float:
        """Median over the turns of a percentile of the latency."""
        return median(percentile(turn.wall_ms, share) for turn in self.turns if turn.wall_ms)

    @property
    def answers_per_s(self) -> float:
        return median(turn.answers_per_s for turn in self.turns)


class Observations(msgspec.Struct, frozen=True, kw_only=True):
    """All turns of a measurement.

    Attributes:
        max_others_share: of all cores; a turn during which other processes used more of them does not count.
    """

    models: str
    commit: str
    measured_at: str  # ISO 8601, UTC
    machine: Machine
    num_slots: int
    num_prompt_tokens: int
    max_others_share: float
    loads: list[Observed]

    def of(self, role: Role) -> list[Observed]:
        """The loads of a role, with the turns that count; the least disturbed one, if all were disturbed."""
        return [
            msgspec.structs.replace(load, turns=_undisturbed(load.turns, self.max_others_share))
            for load in self.loads
            if load.plan.role == role
        ]


def _undisturbed(turns: list[Turn], max_others_share: float) -> list[Turn]:
    kept = [turn for turn in turns if turn.others_share <= max_others_share]
    return kept or [min(turns, key=lambda turn: turn.others_share)]


def read_observations(path: Path) -> Observations:
    """
    Raises:
        StartError: the file is missing, or is not the output of `tercet simulate measure`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Observations)
    except (OSError, msgspec.DecodeError) as error:
        raise StartError(f"{path}: {error}. `tercet simulate measure {path}` writes such a file.") from error


def write_json(path: Path, value: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
