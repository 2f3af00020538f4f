"""One step of the engine: schedule, run, postprocess.

Synchronous: the caller decides in which thread a step runs and when the next one follows. Knows sequences, the
scheduler and a runner. Does not know threads, queues, loading, text or HTTP, and imports no tensor library.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shared.time_margins import MARGINS
from workers.engine.batch import RunnerOutput, SchedulerOutput
from workers.engine.failures import EngineFailure, InvalidOutput, SequenceFailure
from workers.engine.request import EngineRequest, SamplingParams
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import ResultStream, Sequence

SCORED_WINDOW_TOKENS = 512
# The log-probabilities of a text's tokens, as `prompt_logprobs` gives them.
ScoreFn: TypeAlias = Callable[[Items[int]], list[float]]


class Runner(Protocol):
    """Executes steps on a device, from one thread.

    Attributes:
        num_entries: prefix-cache entries that fit in the device's memory.
    """

    num_entries: int

    def run(self, scheduled: SchedulerOutput, /) -> RunnerOutput:
        """Executes one step. After an exception, `drop_caches` must precede the next step."""

    def drop_caches(self) -> None:
        """Drops what it keeps from step to step. The caller uses no prefix-cache entry and no KV suffix any longer."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What one call of `EngineCore.step` took."""

    duration_s: float
    num_steps: int  # decode steps computed for each sequence of the batch; more than 1 after a multi-step decode
    num_first_tokens: int  # sequences that drew their first token
    failures: list[tuple[Sequence, EngineFailure]]  # sequences that ended because their own work failed; not logged yet

    @property
    def s_per_step(self) -> float:
        return self.duration_s / self.num_steps


class EngineCore:
    """The sequences of one runner, advanced step by step. Not thread-safe.

    Attributes:
        scheduler: takes the sequences in; the next step may already run a new one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        eos_ids: Collection[int],
        on_finish: Callable[[Sequence], None] = lambda _: None,
        on_failure: Callable[[EngineFailure], None] = lambda _: None,
    ) -> None:
        """
        Args:
            eos_ids: the tokens that end a sequence.
            on_finish: called with a sequence after it has left the scheduler, before its result is delivered.
            on_failure: called for a failure that ends a single sequence.
        """
        self.scheduler = scheduler
        self._runner = runner
        self._eos_ids = eos_ids
        self._on_finish = on_finish
        self._on_failure = on_failure
        self._decode_step_s = 0.0  # duration of the latest step without prefill

    def step(self) -> StepTiming | None:
        """Runs one step and delivers its tokens. None if there was nothing to run.

        Raises:
            InvalidOutput: a log-probability is not a finite number. No token of the step is delivered.
            Exception: whatever the runner raises. A failure that the runner reports for some sequences, or that is of
                a single sequence, ends those only.

        After an exception only `recover` and `finish_all` may be called.
        """
        start = time.monotonic()
        self._finish_interrupted(start)
        scheduled = self.scheduler.schedule(start)
        if not scheduled:
            return None
        output = self._runner.run(scheduled)
        self.scheduler.complete(scheduled, output.num_steps, [sequence for sequence, _ in output.failures])
        num_first_tokens = len({sequence for sequence, _ in output.tokens if not sequence.token_ids})
        self._postprocess(output)
        duration_s = time.monotonic() - start
        timing = StepTiming(duration_s, output.num_steps, num_first_tokens, output.failures)
        if not scheduled.chunks:
            self._decode_step_s = timing.s_per_step
        return timing

    def recover(self, failure: EngineFailure) -> None:
        """After a step that failed: ends the sequences that it could have computed, and drops everything cached.

        Sequences that have not been scheduled stay.
        """
        for sequence in self.scheduler.scheduled:
            self._finish(sequence, "error", failure)
        self.scheduler.clear_cache()
        self._runner.drop_caches()

    def finish_all(self, reason: str, failure: EngineFailure | None = None) -> None:
        """Ends every sequence with `reason`."""
        for sequence in self.scheduler.sequences:
            self._finish(sequence, reason, failure)

    def _finish_interrupted(self, now: float) -> None:
        """Ends sequences that are cancelled, past their deadline, or would be before the next step ends."""
        for sequence in self.scheduler.sequences:
            # A sequence that has tokens to return must return them in time; one without has nothing to lose.
            ends_at = now + max(0.0, self._decode_step_s - MARGINS.step_s) if sequence.token_ids else now
            reason = sequence.interruption(ends_at)
            if reason is not None:
                self._finish(sequence, reason)

    def _postprocess(self, output: RunnerOutput) -> None:
        """Appends the new tokens to their sequences, streams them, and ends the sequences that are complete."""
        now = time.monotonic()
        logprobs = [token.logprob for _, token in output.tokens]
        logprobs += [logprob for _, scored in output.prompt_logprobs for logprob in scored.logprobs]
        if not all(map(math.isfinite, logprobs)):
            raise InvalidOutput
        for sequence, failure in output.failures:
            self._finish(sequence, "error", failure)
        for sequence, scored in output.prompt_logprobs:
            sequence.add_prompt_logprobs(scored)
        for sequence, token in output.tokens:
            if sequence.finish_reason is not None:  # tokens past the end, from a multi-step decode
                continue
            try:
                sequence.append(token, self._eos_ids, now)
            except Exception as error:  # noqa: BLE001 - of the tokenizer; a fault of this sequence alone
                failure = SequenceFailure()
                failure.__cause__ = error
                self._on_failure(failure)
                self._finish(sequence, "error", failure)
                continue
            if sequence.request.stream:
                sequence.result_stream.deliver(token)
            if sequence.finish_reason is not None:
                self._finish(sequence, sequence.finish_reason)

    def _finish(self, sequence: Sequence, reason: str, failure: EngineFailure | None = None) -> None:
        sequence.finish_reason = reason
        self.scheduler.remove(sequence)
        self._on_finish(sequence)
        sequence.result_stream.deliver(sequence.output(reason, time.monotonic(), failure))


def prompt_logprobs(runner: Runner, n_ctx: int, token_ids: Items[int]) -> list[float]:
    """The log-probability of each token of a text given those before it in its window, except each window's first.

    Computed as for requests that are served, by a runner that serves none yet. Windows do not overlap.

    Args:
        n_ctx: the model's context size in tokens.
    """
    window = max(1, min(SCORED_WINDOW_TOKENS, n_ctx - 1))
    logprobs: list[float | None] = []
    for first in range(0, len(token_ids) - 1, window):
        ids = tuple(token_ids[first : first + window])
        core = EngineCore(Scheduler(runner.num_entries, 1), runner, eos_ids=())
        request = EngineRequest(ids, SamplingParams(max_new_tokens=1), seed=0, echo_logprobs=True)
        stream = ResultStream()
        core.scheduler.add(Sequence(request, stream, start_id=0, healing=None))
        while core.scheduler.sequences:
            core.step()
        logprobs += stream.result().prompt_logprobs
    return [logprob for logprob in logprobs if logprob is not None]
