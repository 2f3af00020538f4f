"""What a row of docs/RELIABILITY.md is: a promise, the function that measures it, and its result."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console

from deploy.load.rounds import percentile
from tests.chaos.http_client import Endpoint
from tests.chaos.instance import endpoint_of, serving
from tests.e2e.harness import Tercet
from tests.tls import Certificate

Size = Literal["short", "full", "soak"]
T = TypeVar("T")
SOAK_FACTOR = 10


@dataclass(frozen=True)
class RowResult:
    """A row's measured figures, by name and unit, and the sentences that say what falls short.

    Attributes:
        slow: the shortfalls of speed alone. They depend on the machine and on what else it does, so a test
            does not fail for them.
    """

    row: str
    promise: str
    figures: dict[str, float | str]
    shortfalls: list[str]
    slow: list[str]
    note: str
    elapsed_s: float = 0.0

    @property
    def held(self) -> bool:
        return not self.shortfalls


@dataclass
class Findings:
    """A row's result while it is measured."""

    figures: dict[str, float | str] = field(default_factory=dict)
    shortfalls: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    note: str = ""

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


class Context:
    """What a row may use: its seed and size, directories, and instances that rows share."""

    def __init__(self, base: Path, size: Size, seed: int, console: Console) -> None:
        """
        Args:
            base: a new directory whose path is short enough for Unix sockets in it.
        """
        self.size: Size = size
        self.seed = seed
        self.console = console
        self._base = base
        self._num_directories = 0
        self._stack = ExitStack()
        self._instances: dict[tuple[tuple[str, str], ...], Tercet] = {}
        self._certificate: Certificate | None = None
        self._results: dict[str, Any] = {}

    def amount(self, short: int, full: int) -> int:
        """A count or a time in seconds, by size."""
        return {"short": short, "full": full, "soak": SOAK_FACTOR * full}[self.size]

    def directory(self) -> Path:
        """A new directory."""
        self._num_directories += 1
        path = self._base / f"d{self._num_directories}"
        path.mkdir()
        return path

    def shared(self, *, is_tls: bool = False, **settings: str) -> tuple[Tercet, Endpoint]:
        """A warm instance with these settings, by default two slots of the embedded checkpoint.

        Rows share it, so a row that uses it leaves it as it was. It is started at the first call, and again if it died.
        """
        settings = {"models": "embedded*2", **settings}
        key = (("is_tls", str(is_tls)), *sorted(settings.items()))
        certificate = self.certificate if is_tls else None
        tercet = self._instances.get(key)
        if tercet is None or tercet.process.poll() is not None:
            tercet = self._stack.enter_context(serving(self.directory(), certificate, max_descriptors=None, **settings))
            self._instances[key] = tercet
        tercet.wait_until_warm()
        return tercet, endpoint_of(tercet, certificate)

    def once(self, name: str, measure: Callable[[], T]) -> T:
        """What `measure` returned at the first call with this name: for rows that one experiment shows."""
        if name not in self._results:
            self._results[name] = measure()
        result: T = self._results[name]
        return result

    def entered(self, name: str, make: Callable[[], AbstractContextManager[T]]) -> T:
        """What rows share, made at the first call with this name and ended with the context."""
        return self.once(name, lambda: self._stack.enter_context(make()))

    @property
    def certificate(self) -> Certificate:
        if self._certificate is None:
            self._certificate = Certificate(self.directory())
        return self._certificate

    def close(self) -> None:
        self._stack.close()


MeasureRow = Callable[[Context, Findings], None]


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    promise: str
    measure: MeasureRow

    def run(self, context: Context) -> RowResult:
        """Measure. A row that raises falls short, and says why."""
        findings = Findings()
        started_at = time.monotonic()
        try:
            self.measure(context, findings)
        except Exception as error:  # noqa: BLE001 - whatever fails in a row must not hide the other rows
            text = " ".join(str(error).split())
            findings.shortfalls.append(f"stopped by {type(error).__name__}: {text[:400]}")
        elapsed_s = time.monotonic() - started_at
        return RowResult(
            self.name, self.promise, findings.figures, findings.shortfalls, findings.slow, findings.note, elapsed_s
        )


class Jitter:
    """How late a sleeping thread wakes up: the share of a latency that the machine caused, not the server."""

    def __init__(self) -> None:
        self.overshoots_s: list[float] = []
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Jitter]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            before = time.monotonic()
            time.sleep(0.005)
            self.overshoots_s.append(time.monotonic() - before - 0.005)

    def ms(self, share: float) -> float:
        """A percentile (0 to 1) of the overshoot."""
        return 1e3 * percentile(self.overshoots_s, share)


def num_cores() -> int:
    return len(os.sched_getaffinity(0))
