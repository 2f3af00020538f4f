"""What a row of docs/RELIABILITY.md is: a promise, the function that measures it, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.bench.rounds import percentile
from tests.e2e.harness import Background, Tercet, running

Size = Literal["short", "full", "soak"]
SOAK_FACTOR = 10


@dataclass
class Findings:
    """A row's measured figures, by name and unit, and the sentences that say what falls short.

    Attributes:
        slow: the shortfalls of speed alone. They depend on the machine and on what else it does, so a test
            does not fail for them.
    """

    row: str
    promise: str
    figures: dict[str, float] = field(default_factory=dict)
    shortfalls: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        return not self.shortfalls

    def measured(self) -> str:
        """The figures as docs/RELIABILITY.md has them. Those that are 0, like counts of failures, are left out."""
        figures = "; ".join(f"{name} {_number(value)}" for name, value in self.figures.items() if value != 0)
        return figures if self.held else f"**falls short**: {figures}"

    def markdown(self) -> str:
        return f"| {self.row} | {self.promise} | {self.measured()} |"

    def require(self, is_met: bool, shortfall: str) -> None:
        """Note a shortfall unless `is_met`."""
        if not is_met:
            self.shortfalls.append(shortfall)

    def at_most(self, name: str, value: float, bound: float, *, is_speed: bool = False) -> None:
        """A figure that may not exceed a bound; NaN exceeds every bound."""
        self._compare(name, value, value <= bound, f"at most {bound:,.4g}", is_speed)

    def at_least(self, name: str, value: float, bound: float, *, is_speed: bool = False) -> None:
        self._compare(name, value, value >= bound, f"at least {bound:,.4g}", is_speed)

    def _compare(self, name: str, value: float, is_met: bool, bound: str, is_speed: bool) -> None:
        self.figures[name] = value
        self.require(is_met, f"{name}: {value:,.4g}, {bound} promised")
        if is_speed and not is_met:
            self.slow.append(self.shortfalls[-1])

    def none_of(self, name: str, found: dict[str, int]) -> None:
        """Counted events, by description, of which there may be none."""
        self.figures[name] = sum(found.values())
        for what, count in list(found.items())[:3]:
            self.shortfalls.append(f"{name}: {count} × {what}")


def _number(value: float) -> str:
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


class Context:
    """What a row may use: its seed and size, directories, and instances that rows share."""

    def __init__(self, base: Path, size: Size, seed: int) -> None:
        """
        Args:
            base: a new directory whose path is short enough for Unix sockets in it.
        """
        self.size: Size = size
        self.seed = seed
        self._base = base
        self._num_directories = 0
        self._stack = ExitStack()
        self._instances: dict[tuple[tuple[str, str], ...], Tercet] = {}

    def amount(self, short: int, full: int) -> int:
        """A count or a time in seconds, by size."""
        return {"short": short, "full": full, "soak": SOAK_FACTOR * full}[self.size]

    @property
    def pause_s(self) -> float:
        """Of clients that only keep an instance busy: in the short form it shares the cores with other tests."""
        return 0.1 if self.size == "short" else 0.0

    def directory(self) -> Path:
        """A new directory."""
        self._num_directories += 1
        path = self._base / f"d{self._num_directories}"
        path.mkdir()
        return path

    def shared(self, **settings: str) -> Tercet:
        """A warm instance with these settings, by default two slots of the embedded checkpoint.

        Rows share it, so a row that uses it leaves it as it was. It is started at the first call, and again if it died.
        """
        settings = {"models": "embedded*2", **settings}
        key = tuple(sorted(settings.items()))
        tercet = self._instances.get(key)
        if tercet is None or tercet.process.poll() is not None:
            tercet = self._instances[key] = self._stack.enter_context(running(self.directory(), **settings))
        tercet.wait_until_warm()
        return tercet

    def close(self) -> None:
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    promise: str
    measure: Callable[[Context, Findings], None]

    def run(self, context: Context) -> Findings:
        """Measure. A row that raises falls short, and says why."""
        findings = Findings(self.name, self.promise)
        try:
            self.measure(context, findings)
        except Exception as error:  # noqa: BLE001 - whatever fails in a row must not hide the other rows
            text = " ".join(str(error).split())
            findings.shortfalls.append(f"stopped by {type(error).__name__}: {text[:400]}")
        return findings


class Jitter(Background):
    """How late a sleeping thread wakes up: the share of a latency that the machine caused, not the server."""

    def __init__(self) -> None:
        super().__init__()
        self.overshoots_s: list[float] = []

    def run(self) -> None:
        while not self.is_over.is_set():
            before = time.monotonic()
            time.sleep(0.005)
            self.overshoots_s.append(time.monotonic() - before - 0.005)

    def ms(self, share: float) -> float:
        """A percentile (0 to 1) of the overshoot; 0 if the thread has not woken up yet."""
        return 1e3 * percentile(self.overshoots_s or [0.0], share)
