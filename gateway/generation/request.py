"""A request for completions: its spec, the events that its branches deliver, and its state while it is processed.

Knows no dialect: whatever a dialect wants of a completion is a field of the spec.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeAlias

import msgspec

from gateway.pool.placement import Claim
from shared.cancellation import Cancellation, Cancelling
from shared.protocol import MAX_SEED, MAX_TYPED_TOKENS, Done, Group, Prediction, Sampling, Token
from shared.text import MAX_CHARS_PER_TOKEN, SUFFIX_ROOM
from shared.time_margins import MARGINS

# Of the text after a gap, workers read some tokens.
MAX_SUFFIX_CHARS = 200

# The beginning of a document that identifies it where there is no session, in characters or token ids.
DOCUMENT_LENGTH = 200
# By this, clients mean a random seed.
RANDOM = -1
# JavaScript's numbers are exact up to 2⁵³: a client must be able to send back the seed that it reads.
MAX_DRAWN_SEED = 2**53 - 100
# A prompt as text, or as token ids.
Prompt: TypeAlias = str | list[int]


class Caller(msgspec.Struct, frozen=True):
    """Who wants completions.

    Attributes:
        request_id: the request's id in logs and answers.
        owner: id of its API key, without one the client's address ("": a Unix socket).
        max_concurrency: the owner's own limit of requests at a time; None: the default, 0: no limit.
        session: the session that the request's headers name; one in its body comes first.
        sock: the client's connection: the request ends when the client closes it. None: nothing is watched.
        traceparent: the request's span; "" if the request is not traced.
        cancelling: makes a context manager from a function that ends the request; it is entered while the request runs.
        is_job: no client waits for the answer.
        charge: counts bytes that its request costs besides those of its body; raises QuotaExceeded.
    """

    request_id: str
    owner: str = ""
    max_concurrency: int | None = None
    session: str | None = None
    sock: socket.socket | None = None
    traceparent: str = ""
    cancelling: Cancelling = lambda _cancel: nullcontext()
    is_job: bool = False
    charge: Callable[[int], None] = lambda _num_bytes: None


class BranchSpec(msgspec.Struct, frozen=True):
    """One call to a worker: its index in the request, and what differs between the branches."""

    index: int
    prompt: Prompt
    seed: int
    sampling: Sampling
    group: Group
    predict: Prediction | None


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to generate, checked and with every default filled in.

    Attributes:
        prompts: the prompts, at least one. Branches are numbered prompt by prompt.
        max_prompt_tokens: a longer prompt loses its beginning; None: a prompt that the model has no room for fails.
        num_completions: branches of each prompt at the start. Of a single prompt, branches with a higher index replace
            rejected completions.
        seed: seed of each prompt's first branch; its k-th draws with `seed + k`. So a completion does not depend on the
            other prompts of its request.
        ranks_first_token: greedy branches differ: branch k starts with its k-th most likely token (from 0).
        predict: branch k answers the continuation with the k-th likeliest next word; None: samples.
        heals: token healing: where the prompt ends mid-word, the worker backs up to the word's start and constrains the
            output to match it.
        special_as_text: what spells a special token (`<|endoftext|>`) in a prompt or in `suffix` is text, as a writer
            typed it; False: it is that token.
        echoes: report the prompt's tokens and their log-probabilities.
        num_scored_tokens: tokens at the end of the prompt of which branch 0 reports how well the model knows them.
        scores_prior: report how likely the generated tokens are without the prompt.
        num_top_logprobs: most likely tokens to report at each step; None: report no token texts either.
        suffix: the beginning of the text after the gap that completions fill; blank if there is no gap.
        deadline: `time.monotonic()` time.
        session: a newer request of the same session supersedes this one.
        sequence: number of the request in its session; 0: its place is the order of arrival.
    """

    caller: Caller
    model: str
    prompts: tuple[Prompt, ...]
    max_prompt_tokens: int | None
    num_completions: int
    seed: int
    sampling: Sampling
    deadline: float
    session: str | None
    ranks_first_token: bool = False
    heals: bool = False
    special_as_text: bool = False
    echoes: bool = False
    num_scored_tokens: int = 0
    scores_prior: bool = False
    num_top_logprobs: int | None = None
    is_streamed: bool = False
    predict: Prediction | None = None
    suffix: str = ""
    sequence: int = 0

    @property
    def request_id(self) -> str:
        return self.caller.request_id

    @property
    def owner(self) -> str:
        """Quotas, fairness, sessions and the prefix cache are per owner."""
        return self.caller.owner

    @property
    def num_branches(self) -> int:
        """Branches at the start, of all prompts."""
        return len(self.prompts) * self.num_completions

    def branch(self, index: int) -> BranchSpec:
        """The branch of any index, from 0."""
        number, k = divmod(index, self.num_completions) if index < self.num_branches else (0, index)
        sampling = rank_first_token(self.sampling, k) if self.ranks_first_token else self.sampling
        group = Group(id=f"{self.request_id}.{number}", size=self.num_completions)
        predict = None if self.predict is None else msgspec.structs.replace(self.predict, rank=k)
        return BranchSpec(index, self.prompts[number], (self.seed + k) % (MAX_SEED + 1), sampling, group, predict)

    def needed_text(self, prompt: str, n_ctx: int) -> str:
        """What the worker needs of a prompt. All of it where the context, not the request, bounds the window, because
        only the worker knows how much of the context is free; and where its beginning may be a special token."""
        max_tokens = self.max_prompt_tokens
        num_others = self.sampling.max_new_tokens + SUFFIX_ROOM + MAX_TYPED_TOKENS
        if max_tokens is None or max_tokens + num_others > n_ctx or (self.heals and not self.special_as_text):
            return prompt
        return window_text(prompt, max_tokens)


def resolve_seed(seed: int | None) -> int:
    """The seed of a request: the lower 63 bits of what it sends; for None and `RANDOM` a random one."""
    return secrets.randbelow(MAX_DRAWN_SEED) if seed is None or seed == RANDOM else seed % (MAX_SEED + 1)


def document_key(spec: GenerationSpec) -> int | None:
    """Equal for requests from the same document, to place them where it is cached: by session, else by its beginning,
    which typing leaves as it is.

    None for a short document without a session, and for several prompts: they are not worth a place in the cache. All
    gateways give a document the same number.
    """
    prompt = spec.prompts[0] if len(spec.prompts) == 1 else ""
    if spec.session is None and len(prompt) < DOCUMENT_LENGTH:
        return None
    identity = (spec.owner, spec.session) if spec.session is not None else (spec.owner, None, prompt[:DOCUMENT_LENGTH])
    text = repr(identity)  # `repr` escapes surrogates, which have no UTF-8
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def window_text(text: str, max_tokens: int) -> str:
    """The end of a text, of which a window of `max_tokens` is the same as of the whole.

    A worker's window starts at a multiple of its size in tokens, counted in characters from the start of the text
    (`workers.text.window`), so a megabyte of which it would read some thousand characters can be cut at such a
    multiple.
    """
    num_cut = (len(text) - MAX_CHARS_PER_TOKEN * max_tokens) // max_tokens - 1
    return text[max(0, num_cut) * max_tokens :]


def cut_suffix(text: str | None) -> str:
    """What workers need of the text after a gap; empty if it is blank."""
    return text[:MAX_SUFFIX_CHARS] if text and not text.isspace() else ""


def rank_first_token(sampling: Sampling, index: int) -> Sampling:
    """`sampling` for branch `index`: if greedy, it starts with the token of that rank (0: the most likely)."""
    return msgspec.structs.replace(sampling, first_rank=index) if sampling.temperature == 0 else sampling


class TokenDelta(msgspec.Struct, frozen=True):
    """New tokens of a branch. A retried branch starts again from its first token, with a higher `attempt` (from 1)."""

    branch: int
    tokens: tuple[Token, ...]
    attempt: int = 1


class BranchResult(msgspec.Struct, frozen=True):
    """A branch's completion, as its worker sent it. `time_s` includes retries and waiting for room."""

    branch: int
    seed: int
    slot: int
    model: str
    done: Done
    time_s: float


class BranchFailure(msgspec.Struct, frozen=True):
    """Why a branch has no completion, or why its completion was rejected: a stable code and a sentence."""

    branch: int
    code: str
    detail: str


BranchOutcome: TypeAlias = BranchResult | BranchFailure
BranchEvent: TypeAlias = TokenDelta | BranchOutcome


class RequestContext(Cancellation):
    """A request being processed: a queue of its branches' events, and cancellation, which ends all branches and wakes
    `next_event`. Thread-safe.

    Attributes:
        claim: for room in slots.
        num_top_ups: branches started to replace rejected completions.
        lost_workers: slots and process ids of workers whose connection failed during a branch of this request.
        ends_workers: two of them have ended, so that this request may be the cause.
        first_outcomes_at: when all of the first branches had an outcome, of `time.monotonic()`.
    """

    def __init__(self, spec: GenerationSpec) -> None:
        super().__init__()
        self.spec = spec
        self.claim = Claim(
            model=spec.model,
            deadline=spec.deadline,
            owner=spec.owner,
            document=document_key(spec),
            has_session=spec.session is not None,
        )
        self.num_top_ups = 0
        self.lost_workers: set[tuple[int, int]] = set()
        self.ends_workers = False
        self.first_outcomes_at: float | None = None
        self._events: deque[BranchEvent] = deque()
        self._is_closed = False  # takes no further events
        self._until = spec.deadline + MARGINS.collect_s
        self._unstarted = deque(range(spec.num_branches))
        self._num_expected = spec.num_branches  # branches without an outcome

    def take_branch(self) -> BranchSpec | None:
        """The next branch to start, in the order of their indices; None after the last."""
        try:
            index = self._unstarted.popleft()
        except IndexError:
            return None
        return self.spec.branch(index)

    @property
    def num_prompt_chars(self) -> int:
        """Characters of the prompts that are text."""
        return sum(len(prompt) for prompt in self.spec.prompts if isinstance(prompt, str))

    @property
    def is_over(self) -> bool:
        """Whether it is cancelled or past its deadline, so that starting work for it is pointless."""
        return self._is_cancelled or time.monotonic() >= self.spec.deadline

    def expect_outcomes(self, number: int) -> None:
        """Count further branches, before they are started."""
        with self._lock:
            self._num_expected += number

    def deliver(self, event: BranchEvent) -> None:
        """Append an event to the queue. One that comes too late is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._events.append(event)
            if not isinstance(event, TokenDelta):
                self._num_expected -= 1
            if self._is_ready():
                self._changed.notify_all()

    def next_event(self) -> BranchEvent | None:
        """Wait for the next event. None: the request was cancelled, or `MARGINS.collect_s` after its deadline; from
        then on the queue takes no further events, so it ends even if branches send without a pause.

        Unless the request is streamed, events wait for the last branch's outcome: to wake the thread for each costs
        more than to handle it.
        """
        with self._lock:
            if not self._is_ready():
                self._changed.wait_for(self._is_ready, timeout=max(0.0, self._until - time.monotonic()))
            self._is_closed = self._is_closed or time.monotonic() >= self._until
            return self._events.popleft() if self._events and not self._is_cancelled else None

    def _is_ready(self) -> bool:
        return self._is_cancelled or (bool(self._events) and (self.spec.is_streamed or self._num_expected <= 0))
