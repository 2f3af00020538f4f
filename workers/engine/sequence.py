"""What goes into the engine and what comes out of it: plain values, and one sequence's state.

Speaks token ids, seconds and counts. Refuses to know tensors, the device and the wire.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from workers.engine.request import EngineRequest, GeneratedToken, SequenceOutput, TopLogprobs
from workers.engine.result_stream import ResultStream
from workers.text.stop_strings import StopMatcher
from workers.text.token_healing import TokenConstraint
from workers.text.tokenizer import Tokenizer


class Sequence:
    """One request inside the engine: its tokens so far, whether it has ended, and its clock."""

    __slots__ = (
        "_matcher",
        "_num_bytes",
        "_num_free_bytes",
        "_tokenizer",
        "_typed",
        "cached_tokens",
        "finish_reason",
        "first_token_at",
        "logprobs",
        "num_forced",
        "num_kept",
        "prompt",
        "prompt_logprobs",
        "prompt_tops",
        "request",
        "result_stream",
        "scheduled_at",
        "submitted_at",
        "token_ids",
        "tops",
    )

    def __init__(
        self,
        request: EngineRequest,
        generation: ResultStream,
        *,
        start_id: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        """
        Args:
            start_id: what an empty prompt starts from.
            tokenizer: needed only where the request has stop strings, or text that was typed already.
        """
        self.request = request
        self.result_stream = generation
        self.prompt = request.prompt_ids or (start_id,)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[TopLogprobs] = []
        # Nothing comes before a prompt's first token.
        self.prompt_logprobs: list[float | None] = [None] * request.echo_logprobs
        self.prompt_tops: list[TopLogprobs] = [()] * request.echo_logprobs
        self.num_kept = 0
        self.num_forced = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.submitted_at = time.monotonic()
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        sampling = request.sampling
        self._tokenizer = tokenizer
        self._typed = request.forced_prefix  # what is still to be said of it
        self._matcher = None
        self._num_bytes: list[int] = []  # of each token, where stop strings are watched for
        self._num_free_bytes = 0
        if sampling.stop or sampling.single_line:
            self._matcher = StopMatcher(sampling.stop, single_line=sampling.single_line)

    @property
    def num_new(self) -> int:
        """Tokens that say something new."""
        return len(self.token_ids) - self.num_forced

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """The tokens that are computed with the prompt, while none is drawn."""
        return () if self.token_ids else self.request.forced_ids

    def constraint(self, num_forced_ids: int = 0) -> TokenConstraint | None:
        """Which tokens can come next, after so many of the draft, or None where any can."""
        if not self._typed:
            return None
        assert self._tokenizer is not None
        said = b"".join(map(self._tokenizer.token_bytes, self.forced_ids[:num_forced_ids]))
        left = self._typed[len(said) :]
        return self._tokenizer.constraint(left) if left else None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and text."""
        return len(self.prompt) + len(self.token_ids)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens `start` to `stop` of prompt and text."""
        num_prompt = len(self.prompt)
        if stop <= num_prompt:
            return self.prompt[start:stop]
        own = self.token_ids[max(0, start - num_prompt) : stop - num_prompt]
        return (*self.prompt[start:], *own)

    def start(self, now: float, cached_tokens: int) -> None:
        """Notes when it was first scheduled, and how much of its prompt was there already."""
        if self.scheduled_at is None:
            self.scheduled_at = now
            self.cached_tokens = cached_tokens

    def append(self, step: GeneratedToken, eos_id: int | None, now: float) -> None:
        """Takes one more token, and sets `finish_reason` if it is the last."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.token_ids.append(step.token_id)
        self.logprobs.append(step.logprob)
        if self.request.sampling.top_logprobs:
            self.tops.append(step.top)
        self.num_kept = len(self.token_ids)
        num_forced_bytes = self._take_typed(step.token_id) if self._typed else 0
        if step.token_id == eos_id:
            self.num_kept -= 1
            self.finish_reason = "eos"
        elif self._matcher is not None and self._stops_at(step.token_id, num_forced_bytes):
            self.finish_reason = "stop"
        elif self.num_new >= self.request.sampling.max_new_tokens:
            self.finish_reason = "length"

    def add_prompt_logprobs(self, items: Iterable[tuple[float, TopLogprobs]]) -> None:
        """Takes the log-probabilities of the prompt's next tokens."""
        for logprob, top in items:
            self.prompt_logprobs.append(logprob)
            self.prompt_tops.append(top)

    def interruption(self, by: float) -> str | None:
        """Why this sequence must end although it has tokens to come, or None.

        Args:
            by: when its next token would be there.
        """
        if self.result_stream.is_cancelled:
            return "cancelled"
        if self.request.deadline is not None and by >= self.request.deadline:
            return "deadline"
        return None

    def finished(self, reason: str, now: float, error: str | None = None) -> SequenceOutput:
        """The result as of now. Times that did not begin are 0."""
        scheduled_at = now if self.scheduled_at is None else self.scheduled_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        return SequenceOutput(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            cached_tokens=self.cached_tokens,
            queue_ms=1e3 * (scheduled_at - self.submitted_at),
            prefill_ms=1e3 * (first_token_at - scheduled_at),
            decode_ms=1e3 * (now - first_token_at),
            tops=tuple(self.tops),
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_tops=tuple(self.prompt_tops),
            error=error,
            num_kept=self.num_kept,
            num_forced=self.num_forced,
            first_token_at=self.first_token_at,
            ended_at=now,
        )

    def _take_typed(self, token_id: int) -> int:
        """Takes off `_typed` what the token says of it; how many bytes."""
        assert self._tokenizer is not None
        data = self._tokenizer.token_bytes(token_id)
        number = min(len(data), len(self._typed))
        self._typed = self._typed[number:]
        self.num_forced += number == len(data)
        return number

    def _stops_at(self, token_id: int, num_forced_bytes: int) -> bool:
        """Whether a stop string is complete now; sets `num_kept` to the tokens before it.

        Args:
            num_forced_bytes: of the token's, those that are not new.
        """
        assert self._matcher is not None
        assert self._tokenizer is not None
        data = self._tokenizer.token_bytes(token_id)[num_forced_bytes:]
        self._num_bytes.append(len(data))
        self._num_free_bytes += len(self._matcher.feed(data))
        if not self._matcher.has_stopped:
            return False
        # A token is kept if it begins before the stop string does.
        begin = 0
        self.num_kept = self.num_forced
        for num_bytes in self._num_bytes[self.num_forced :]:
            if begin >= self._num_free_bytes:
                break
            begin += num_bytes
            self.num_kept += 1
        return True
