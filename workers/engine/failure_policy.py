"""What the engine does about a failure: which it survives, when a load is tried again, and what a hang says.

    a load fails      tried again after a pause, unless the device has failed
    a step fails      fatal, unless it is one that a device recovers from and the first since a sequence drew its first
                      token
    a hang            fatal

After a fatal failure the process must end: what it computes may be wrong. Knows failures, time and prompts. Does not
know which exceptions mean which failure (`foreign_errors` does), threads and the device.
"""

from __future__ import annotations

from collections.abc import Iterator

from workers.engine.failures import EngineFailure, Hang
from workers.engine.sequence import Sequence

FIRST_LOAD_PAUSE_S = 1.0  # doubled after each failed load
MAX_LOAD_PAUSE_S = 30.0
# Branches of a request, and the gateway's retries of them, reach a worker within milliseconds; a loaded machine takes
# longer.
MAX_SIBLING_DELAY_S = 1.0


def load_pauses() -> Iterator[float]:
    """Seconds to wait after the first failed load, after the second, and so on without end."""
    pause_s = FIRST_LOAD_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MAX_LOAD_PAUSE_S)


def restart_pause_s(num_failures: int) -> float:
    """Seconds to wait before the first load of a process, after `num_failures` that died before they were warm."""
    return min(MAX_LOAD_PAUSE_S, FIRST_LOAD_PAUSE_S * 2 ** (num_failures - 1)) if num_failures else 0.0


def load_hang(load_s: float) -> Hang:
    """The failure of a load that took longer than `load_s`."""
    return Hang(
        f"The model was not loaded within {load_s:g} s; its worker is being replaced. If the disk or a first "
        "compilation of kernels needs longer, raise TERCET_LOAD_S."
    )


class StepFailures:
    """The failures of an engine's steps. For the engine's thread."""

    def __init__(self) -> None:
        self._has_just_failed = False  # no sequence drew its first token since the last failure
        self._failed_prompts: set[tuple[int, ...]] = set()  # of the sequences that a step could not compute last
        self._failed_at = float("-inf")

    def accept(self, failure: EngineFailure) -> None:
        """Accept a failure that the engine survives.

        Raises:
            EngineFailure: it is fatal, or the second without a sequence that has drawn its first token in between.
                Later tokens do not count: a running batch needs no new memory.
        """
        if self._has_just_failed or not failure.is_recoverable:
            raise failure
        self._has_just_failed = True

    def accept_of_sequences(self, failures: list[tuple[Sequence, EngineFailure]], now: float) -> EngineFailure:
        """Accept the failures of sequences that a step could not compute, which count as one.

        Those of siblings are one failure, whether or not they came in the same step: else a single request, whose
        branches do not arrive together, would end the process.

        Args:
            now: `time.monotonic()` seconds.

        Returns:
            The failure that they are.

        Raises:
            EngineFailure: as `accept`.
        """
        prompts = {sequence.prompt for sequence, _ in failures}
        failure = failures[0][1]
        if not (prompts <= self._failed_prompts and now - self._failed_at < MAX_SIBLING_DELAY_S):
            self.accept(failure)
            self._failed_prompts, self._failed_at = prompts, now
        return failure

    def count_first_tokens(self, number: int) -> None:
        """Record that sequences drew their first token in a step without a failure."""
        if number:
            self._has_just_failed = False
