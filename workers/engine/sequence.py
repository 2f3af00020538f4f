"""What goes into the engine and what comes out of it: plain values, and one sequence's state.

Speaks token ids, seconds and counts. Refuses to know tensors, the device and the wire.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from workers.engine.tokens import Choices, StopMatcher, Tokenizer


class EngineError(Exception):
    """Anything that the engine refuses."""


class EngineFull(EngineError):
    """As many sequences run and wait as the engine holds."""


class EngineNotReady(EngineError):
    """The engine has no model yet, or takes nothing new any more."""


class InvalidPrompt(EngineError, ValueError):
    """A request that this model cannot serve, ever; the text says which part of it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence draws its tokens, and when it ends."""

    max_new_tokens: int = 20
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 50  # 0 is off
    top_p: float = 0.95  # 0 or 1 is off
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    single_line: bool = False
    first_rank: int = 0  # greedy only: the first token that says something new is the one of this rank
    top_logprobs: int = 0  # likeliest tokens to report with each step


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `prompt_ids` may be empty: it then starts from `<|endoftext|>`.

    What it generates begins with `typed`; tokens that say nothing but that are not counted as new. `draft_ids` say
    `typed` as a tokenizer would: they are computed with the prompt, and as far as they are drawn they cost no step.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    typed: bytes = b""
    draft_ids: tuple[int, ...] = ()
    deadline: float | None = None  # time.monotonic() seconds
    group: tuple[str, int] | None = None  # (id, size) of the siblings with the same prompt
    stream: bool = False  # steps are wanted one by one
    echo_logprobs: bool = False  # the prompt's own log-probabilities are wanted
    session: str | None = None


TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token. `logprob` is under the unmodified distribution."""

    token_id: int
    logprob: float
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sequence: everything generated, why it ended, and where the time went.

    `token_ids` are all that the steps had, `<|endoftext|>` and the tokens of a stop string
    included; the first `num_kept` of them carry the text that remains, but for the first `num_typed`,
    which say nothing that was not typed already: those between are the ones to score.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str  # length, eos, stop, deadline, cancelled or error
    cached_tokens: int  # of the prompt, those that this sequence did not wait for
    queue_ms: float  # submitted → first scheduled
    prefill_ms: float  # first scheduled → first token
    decode_ms: float  # first token → last
    tops: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()  # the first is None: nothing comes before it
    prompt_tops: tuple[TopLogprobs, ...] = ()  # the first is empty
    error: str | None = None
    num_kept: int = 0
    num_typed: int = 0
    first_token_at: float | None = None  # time.monotonic() seconds
    ended_at: float | None = None


# A step is not kept from its reader for longer, if another follows.
MAX_HELD_S = 0.01
NUM_TOLD_AT_ONCE = 4  # it takes two or three to say a word


class Generation:
    """The caller's end of one sequence. Any thread may call it; one at a time should read it.

    Each time that the reader is woken costs the engine something, so steps that follow each other quickly come
    together: the first four one by one, then each time as many as have come before, or those of ten milliseconds.
    """

    __slots__ = ("_finished", "_held", "_num_told", "_on_cancel", "_queue", "_told", "_told_at", "is_cancelled")

    def __init__(self, on_cancel: Callable[[], None] = lambda: None) -> None:
        self._queue: queue.SimpleQueue[list[Step | Finished]] = queue.SimpleQueue()
        # The engine's.
        self._held: list[Step | Finished] = []
        self._num_told = 0
        self._told_at = 0.0
        # The reader's.
        self._told: deque[Step | Finished] = deque()
        self._finished: Finished | None = None
        self._on_cancel = on_cancel
        self.is_cancelled = False

    def next(self, timeout_s: float | None = None) -> Step | Finished | None:
        """What comes next, or None if nothing does in time; `Finished` stays the answer."""
        if self._finished is not None:
            return self._finished
        if not self._told:
            try:
                self._told.extend(self._queue.get(timeout=timeout_s))
            except queue.Empty:
                return None
        item = self._told.popleft()
        if isinstance(item, Finished):
            self._finished = item
        return item

    @property
    def has_more(self) -> bool:
        """Whether something has come already with what `next` gave last."""
        return bool(self._told)

    def steps(self) -> Iterator[Step | Finished]:
        """All steps (of a streamed sequence; others have none), then `Finished`."""
        while True:
            item = self.next()
            assert item is not None  # no timeout was given
            yield item
            if isinstance(item, Finished):
                return

    def result(self) -> Finished:
        """Waits for the end."""
        for item in self.steps():
            if isinstance(item, Finished):
                return item
        raise AssertionError("steps() ends with Finished")

    def cancel(self) -> None:
        """Ends the sequence after at most one more step, with `finish_reason` "cancelled"."""
        if self._finished is None and not self.is_cancelled:
            self.is_cancelled = True
            self._on_cancel()

    def put(self, item: Step | Finished) -> None:
        """The engine's end."""
        now = time.monotonic()
        self._held.append(item)
        is_due = (
            self._num_told < NUM_TOLD_AT_ONCE or len(self._held) >= self._num_told or now - self._told_at >= MAX_HELD_S
        )
        if is_due or isinstance(item, Finished):
            self._num_told += len(self._held)
            self._told_at = now
            self._queue.put(self._held)
            self._held = []


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
        "generation",
        "logprobs",
        "num_kept",
        "num_typed",
        "prompt",
        "prompt_logprobs",
        "prompt_tops",
        "request",
        "scheduled_at",
        "submitted_at",
        "token_ids",
        "tops",
    )

    def __init__(
        self,
        request: GenerationRequest,
        generation: Generation,
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
        self.generation = generation
        self.prompt = request.prompt_ids or (start_id,)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[TopLogprobs] = []
        # Nothing comes before a prompt's first token.
        self.prompt_logprobs: list[float | None] = [None] * request.echo_logprobs
        self.prompt_tops: list[TopLogprobs] = [()] * request.echo_logprobs
        self.num_kept = 0
        self.num_typed = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.submitted_at = time.monotonic()
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        sampling = request.sampling
        self._tokenizer = tokenizer
        self._typed = request.typed  # what is still to be said of it
        self._matcher = None
        self._num_bytes: list[int] = []  # of each token, where stop strings are watched for
        self._num_free_bytes = 0
        if sampling.stop or sampling.single_line:
            self._matcher = StopMatcher(sampling.stop, single_line=sampling.single_line)

    @property
    def num_new(self) -> int:
        """Tokens that say something new."""
        return len(self.token_ids) - self.num_typed

    @property
    def draft(self) -> tuple[int, ...]:
        """The tokens that are computed with the prompt, while none is drawn."""
        return () if self.token_ids else self.request.draft_ids

    def choices(self, num_drafted: int = 0) -> Choices | None:
        """Which tokens can come next, after so many of the draft, or None where any can."""
        if not self._typed:
            return None
        assert self._tokenizer is not None
        said = b"".join(map(self._tokenizer.token_bytes, self.draft[:num_drafted]))
        left = self._typed[len(said) :]
        return self._tokenizer.choices(left) if left else None

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

    def append(self, step: Step, eos_id: int | None, now: float) -> None:
        """Takes one more token, and sets `finish_reason` if it is the last."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.token_ids.append(step.token_id)
        self.logprobs.append(step.logprob)
        if self.request.sampling.top_logprobs:
            self.tops.append(step.top)
        self.num_kept = len(self.token_ids)
        num_typed_bytes = self._take_typed(step.token_id) if self._typed else 0
        if step.token_id == eos_id:
            self.num_kept -= 1
            self.finish_reason = "eos"
        elif self._matcher is not None and self._stops_at(step.token_id, num_typed_bytes):
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
        if self.generation.is_cancelled:
            return "cancelled"
        if self.request.deadline is not None and by >= self.request.deadline:
            return "deadline"
        return None

    def finished(self, reason: str, now: float, error: str | None = None) -> Finished:
        """The result as of now. Times that did not begin are 0."""
        scheduled_at = now if self.scheduled_at is None else self.scheduled_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        return Finished(
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
            num_typed=self.num_typed,
            first_token_at=self.first_token_at,
            ended_at=now,
        )

    def _take_typed(self, token_id: int) -> int:
        """Takes off `_typed` what the token says of it; how many bytes."""
        assert self._tokenizer is not None
        data = self._tokenizer.token_bytes(token_id)
        number = min(len(data), len(self._typed))
        self._typed = self._typed[number:]
        self.num_typed += number == len(data)
        return number

    def _stops_at(self, token_id: int, num_typed_bytes: int) -> bool:
        """Whether a stop string is complete now; sets `num_kept` to the tokens before it.

        Args:
            num_typed_bytes: of the token's, those that are not new.
        """
        assert self._matcher is not None
        assert self._tokenizer is not None
        data = self._tokenizer.token_bytes(token_id)[num_typed_bytes:]
        self._num_bytes.append(len(data))
        self._num_free_bytes += len(self._matcher.feed(data))
        if not self._matcher.has_stopped:
            return False
        # A token is kept if it begins before the stop string does.
        begin = 0
        self.num_kept = self.num_typed
        for num_bytes in self._num_bytes[self.num_typed :]:
            if begin >= self._num_free_bytes:
                break
            begin += num_bytes
            self.num_kept += 1
        return True
