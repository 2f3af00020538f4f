"""A sequence: one request inside the engine, and the result stream by which its caller reads what it generates.

Keeps the tokens generated so far, decides when they are complete, and records when what happened. Knows token ids,
bytes and seconds, and two threads: the engine's, which delivers, and a reader's. Does not know tensors, the device,
scheduling and the wire.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TypeVar

from workers.engine.arithmetic_code import first_code
from workers.engine.failures import EngineFailure
from workers.engine.request import EngineRequest, GeneratedToken, PromptLogprobs, SequenceOutput, TopLogprobs
from workers.text.detokenizer import StopMatcher
from workers.text.token_healing import AllowedTokens, ForcedPrefix, TokenHealing
from workers.text.tokenizer import Tokenizer

# A token is delivered after this time at the latest, if another token follows.
MAX_DELIVERY_DELAY_S = 0.01
# The first tokens are delivered one at a time: a word takes two or three of them.
NUM_DELIVERED_SINGLY = 4
# Longest time of one multi-step decode. If nothing interrupts it, the watchdog, deadlines and new sequences wait.
MAX_MULTI_STEP_S = 0.05

T = TypeVar("T")


class ResultStream:
    """The output of one sequence. Any thread may cancel it; one thread at a time should read it.

    Waking the reader costs the engine time, so tokens in quick succession are delivered in batches: the first
    NUM_DELIVERED_SINGLY one at a time, after that as many as were delivered before, or those of MAX_DELIVERY_DELAY_S.
    """

    def __init__(self, on_cancel: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            on_cancel: called once, in the thread that cancels.
        """
        self._queue: queue.SimpleQueue[list[GeneratedToken | SequenceOutput]] = queue.SimpleQueue()
        # State of the engine's thread.
        self._pending: list[GeneratedToken | SequenceOutput] = []
        self._num_delivered = 0
        self._delivered_at = 0.0
        # State of the reader's thread.
        self._delivered: deque[GeneratedToken | SequenceOutput] = deque()
        self._finished: SequenceOutput | None = None
        self._on_cancel = on_cancel
        self.is_cancelled = False

    def next(self, timeout_s: float | None = None) -> GeneratedToken | SequenceOutput | None:
        """Waits for the next output; None on timeout. After the `SequenceOutput`, returns it again."""
        if self._finished is not None:
            return self._finished
        if not self._delivered:
            try:
                self._delivered.extend(self._queue.get(timeout=timeout_s))
            except queue.Empty:
                return None
        output = self._delivered.popleft()
        if isinstance(output, SequenceOutput):
            self._finished = output
        return output

    @property
    def has_more(self) -> bool:
        """Whether further outputs were delivered together with the one that `next` returned last."""
        return bool(self._delivered)

    def result(self) -> SequenceOutput:
        """Waits for the end of the sequence."""
        while not isinstance(output := self.next(), SequenceOutput):
            pass
        return output

    def cancel(self) -> None:
        """Ends the sequence after at most one more decode step, with `finish_reason` "cancelled"."""
        if self._finished is None and not self.is_cancelled:
            self.is_cancelled = True
            self._on_cancel()

    def deliver(self, output: GeneratedToken | SequenceOutput) -> None:
        """Adds an output and wakes the reader, or keeps the output for the next batch. For the engine's thread."""
        now = time.monotonic()
        self._pending.append(output)
        is_due = (
            self._num_delivered < NUM_DELIVERED_SINGLY
            or len(self._pending) >= self._num_delivered
            or now - self._delivered_at >= MAX_DELIVERY_DELAY_S
        )
        if is_due or isinstance(output, SequenceOutput):
            self._num_delivered += len(self._pending)
            self._delivered_at = now
            self._queue.put(self._pending)
            self._pending = []


class Sequence:
    """One request, its tokens so far, and how it ended.

    Attributes:
        prompt: token ids of the prompt; at least one.
        token_ids: generated so far, those of a forced prefix included.
        code: code by which the next token is drawn.
        num_kept: generated tokens that remain when a stop string or the end token is cut off.
        finish_reason: None while the sequence runs.
        submitted_at: `time.monotonic()` time.
    """

    def __init__(
        self,
        request: EngineRequest,
        result_stream: ResultStream,
        *,
        start_id: int,
        healing: TokenHealing | None,
    ) -> None:
        """
        Args:
            start_id: stands for an empty prompt.
            healing: required if the request has stop strings or a forced prefix.
        """
        self.request = request
        self.result_stream = result_stream
        self.prompt = request.prompt_ids or (start_id,)
        self.token_ids: list[int] = []
        self.code = first_code(request.seed)
        self.num_kept = 0
        self.finish_reason: str | None = None
        self.submitted_at = time.monotonic()
        self._logprobs: list[float] = []
        self._tops: list[TopLogprobs] = []
        # The first token of a prompt has no log-probability.
        has_unscored = request.echo_logprobs and bool(request.prompt_ids)
        self._prompt_logprobs: list[float | None] = [None] if has_unscored else []
        self._prompt_tops: list[TopLogprobs | None] = [None] if has_unscored else []
        self._cached_tokens = 0
        self._scheduled_at: float | None = None
        self._first_token_at: float | None = None
        self._constraint: ForcedPrefix | None = None
        self._stop_search: _StopSearch | None = None
        self._sampling = sampling = request.sampling
        if request.forced_prefix:
            assert healing is not None
            self._constraint = ForcedPrefix(healing, request.forced_prefix)
        if sampling.stop or sampling.single_line:
            assert healing is not None
            self._stop_search = _StopSearch(
                healing.tokenizer, StopMatcher(sampling.stop, single_line=sampling.single_line)
            )

    @property
    def num_forced(self) -> int:
        """Generated tokens that carry nothing but the forced prefix."""
        return 0 if self._constraint is None else self._constraint.num_forced

    @property
    def num_new(self) -> int:
        """Generated tokens that count towards `max_new_tokens`: those that carry new text."""
        return len(self.token_ids) - self.num_forced

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """The likely tokens of the forced prefix, which are prefilled with the prompt; empty after the first token."""
        return () if self.token_ids else self.request.forced_ids

    def allowed_next(self, num_forced_ids: int = 0) -> AllowedTokens | None:
        """Tokens allowed after the generated ones and then the first `num_forced_ids` of `forced_ids`.

        None if any token is.
        """
        if self._constraint is None:
            return None
        return self._constraint.allowed_next(self.forced_ids[:num_forced_ids])

    @property
    def starts_with_path(self) -> bool:
        """Whether its next tokens are those of a ranked path (`engine.paths`)."""
        return self._sampling.path_rank is not None and not self.token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and generated ones."""
        return len(self.prompt) + len(self.token_ids)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens `start` to `stop` of the prompt followed by the generated ones."""
        num_prompt = len(self.prompt)
        if stop <= num_prompt:
            return self.prompt[start:stop]
        own = self.token_ids[max(0, start - num_prompt) : stop - num_prompt]
        return (*self.prompt[start:], *own)

    def start(self, now: float, cached_tokens: int) -> None:
        """Records when the sequence was first scheduled, and how many prompt tokens were cached. Idempotent."""
        if self._scheduled_at is None:
            self._scheduled_at = now
            self._cached_tokens = cached_tokens

    def append(self, token: GeneratedToken, eos_ids: Collection[int], now: float) -> None:
        """Adds a generated token, and sets `finish_reason` if it is the last.

        Raises:
            IndexError: if the token is not in the tokenizer's vocabulary, and its bytes are needed.
        """
        if self._first_token_at is None:
            self._first_token_at = now
            if not self._sampling.max_new_tokens:  # only the prompt's scores are wanted: the token is dropped
                self.finish_reason = "length"
                return
        token_id, sampling, constraint = token.token_id, self._sampling, self._constraint
        self.token_ids.append(token_id)
        self._logprobs.append(token.logprob)
        if token.code is not None:
            self.code = token.code
        if sampling.top_logprobs:
            self._tops.append(token.top)
        self.num_kept = num_new = len(self.token_ids)
        num_forced_bytes = 0
        if constraint is not None:
            num_forced_bytes = constraint.accept(token_id)
            num_new -= constraint.num_forced
        if token_id in eos_ids:
            self.num_kept -= 1
            self.finish_reason = "eos"
        elif self._stop_search is not None and self._stop_search.feed(token_id, num_forced_bytes):
            self.num_kept = self.num_forced + self._stop_search.count_kept(self.num_forced)
            self.finish_reason = "stop"
        elif num_new >= sampling.max_new_tokens or self._is_improbable():
            self.finish_reason = "length"

    def _is_improbable(self) -> bool:
        min_logprob = self._sampling.min_logprob
        return min_logprob is not None and sum(self._logprobs) < min_logprob

    def add_prompt_logprobs(self, scored: PromptLogprobs) -> None:
        """Adds the log-probabilities of the next tokens of the prompt."""
        self._prompt_logprobs += scored.logprobs
        self._prompt_tops += scored.tops

    def interruption(self, ends_at: float) -> str | None:
        """Why the sequence must end before its next token, as a finish reason, or None.

        Args:
            ends_at: when the next token would be delivered, in `time.monotonic()` seconds.
        """
        if self.result_stream.is_cancelled:
            return "cancelled"
        if self.request.deadline is not None and ends_at >= self.request.deadline:
            return "deadline"
        return None

    def multi_step_budget_s(self, now: float) -> float:
        """How long a multi-step decode that includes the sequence may take; 0 for a single step."""
        request = self.request
        budget_s = MAX_MULTI_STEP_S
        if request.deadline is not None:
            budget_s = min(budget_s, request.deadline - now)
        if self._stop_search is not None:
            budget_s = min(budget_s, MAX_DELIVERY_DELAY_S)  # steps after a stop string are computed for nothing
        if request.stream:
            is_batched = len(self.token_ids) >= NUM_DELIVERED_SINGLY
            budget_s = min(budget_s, MAX_DELIVERY_DELAY_S if is_batched else 0.0)
        return budget_s

    def output(self, reason: str, now: float, failure: EngineFailure | None = None) -> SequenceOutput:
        """The result of a sequence that ends `now`. Phases that did not begin take 0 ms."""
        scheduled_at = now if self._scheduled_at is None else self._scheduled_at
        first_token_at = now if self._first_token_at is None else self._first_token_at
        return SequenceOutput(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=reason,
            cached_tokens=self._cached_tokens,
            queue_ms=1e3 * (scheduled_at - self.submitted_at),
            prefill_ms=1e3 * (first_token_at - scheduled_at),
            decode_ms=1e3 * (now - first_token_at),
            tops=tuple(self._tops),
            prompt_logprobs=self._echoed(self._prompt_logprobs),
            prompt_tops=self._echoed(self._prompt_tops),
            failure=failure,
            num_kept=self.num_kept,
            num_forced=self.num_forced,
            first_token_at=self._first_token_at,
            ended_at=now,
        )

    def _echoed(self, items: list[T]) -> tuple[T, ...]:
        """The items of the prompt's tokens from `echo_from` on. More were computed if less was cached."""
        if not self.request.echo_from:
            return tuple(items)
        is_complete = self._first_token_at is not None
        return tuple(items[self.request.echo_from - len(self.prompt) :]) if is_complete else ()


class _StopSearch:
    """Looks for stop strings in the new text of a sequence, token by token."""

    def __init__(self, tokenizer: Tokenizer, matcher: StopMatcher) -> None:
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._num_bytes: list[int] = []  # new bytes of each token
        self._num_bytes_before_stop = 0

    def feed(self, token_id: int, num_forced_bytes: int) -> bool:
        """Whether a stop string is complete with this token, whose first `num_forced_bytes` are not new text."""
        data = self._tokenizer.token_bytes(token_id)[num_forced_bytes:]
        self._num_bytes.append(len(data))
        self._num_bytes_before_stop += len(self._matcher.feed(data))
        return self._matcher.has_stopped

    def count_kept(self, num_skipped: int) -> int:
        """Count the tokens after the first `num_skipped` that begin before the stop string does."""
        begin = num_kept = 0
        for num_bytes in self._num_bytes[num_skipped:]:
            if begin >= self._num_bytes_before_stop:
                break
            begin += num_bytes
            num_kept += 1
        return num_kept
