"""What goes into the engine and what comes out of it, as plain values.

Speaks token ids, seconds and counts. Refuses to know tensors, the device and the wire.
"""

from __future__ import annotations

from dataclasses import dataclass


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
class EngineRequest:
    """One sequence to generate. `prompt_ids` may be empty: it then starts from `<|endoftext|>`.

    What it generates begins with `typed`; tokens that say nothing but that are not counted as new. `forced_ids` say
    `typed` as a tokenizer would: they are computed with the prompt, and as far as they are drawn they cost no step.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    forced_prefix: bytes = b""
    forced_ids: tuple[int, ...] = ()
    deadline: float | None = None  # time.monotonic() seconds
    group: tuple[str, int] | None = None  # (id, size) of the siblings with the same prompt
    stream: bool = False  # steps are wanted one by one
    echo_logprobs: bool = False  # the prompt's own log-probabilities are wanted
    session: str | None = None


TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One generated token. `logprob` is under the unmodified distribution."""

    token_id: int
    logprob: float
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """The end of a sequence: everything generated, why it ended, and where the time went.

    `token_ids` are all that the steps had, `<|endoftext|>` and the tokens of a stop string
    included; the first `num_kept` of them carry the text that remains, but for the first `num_forced`,
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
    num_forced: int = 0
    first_token_at: float | None = None  # time.monotonic() seconds
    ended_at: float | None = None
