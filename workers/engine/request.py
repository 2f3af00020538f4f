"""The engine's input and output as plain values.

Token ids, seconds and counts. Does not know tensors, the device and the wire.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from shared.sampling import Sampling
from workers.engine.arithmetic_code import Code
from workers.engine.failures import ContextExceeded, EngineFailure, InvalidPrompt

# Biases are applied at each draw, in the engine's thread.
MAX_BIASED_TOKENS = 1024
# Paths that a step ranks.
MAX_PATH_RANK = 15


class SamplingParams(Sampling, frozen=True):
    """How the tokens of one sequence are sampled, and when it ends."""

    path_rank: int | None = None  # greedy only: the tokens up to the first with new text are this path (`engine.paths`)
    min_logprob: float | None = None  # the sequence ends when its tokens together are less likely than this
    top_logprobs: int = 0  # likeliest tokens to report for each generated token, and each echoed one of the prompt

    @property
    def is_plain(self) -> bool:
        """Whether draws are shaped by temperature, top-k and top-p only, and report one log-probability.

        That is all that the kernels implement; `sampling.sample` implements every parameter.
        """
        has_penalty = self.repetition_penalty != 1 or self.has_count_penalty
        has_warper = self.min_p != 0 or 0 < self.typical_p < 1
        return not has_warper and not has_penalty and not self.logit_bias and self.top_logprobs == 0

    @property
    def limits(self) -> tuple[float, float, float, float, float]:
        """The limits of the warpers: temperature, top-k, top-p, which kernels implement too; min-p and typical-p.

        Where a warper is disabled, its limit is a number that changes nothing.
        """
        top_p, typical_p = (each if 0 < each < 1 else 2.0 for each in (self.top_p, self.typical_p))
        return self.temperature or 1.0, self.top_k or float("inf"), top_p, self.min_p, typical_p

    @property
    def has_count_penalty(self) -> bool:
        """Whether a logit depends on how often its token was generated."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    def problem(self, vocab_size: int) -> str | None:
        """Which value a model with this vocabulary cannot serve; None if it can. The protocol bounds the others."""
        limits = {
            f"logit_bias must name at most {MAX_BIASED_TOKENS} tokens": len(self.logit_bias) <= MAX_BIASED_TOKENS,
            "logit_bias must name a token once": len({id_ for id_, _ in self.logit_bias}) == len(self.logit_bias),
            f"logit_bias must name token ids between 0 and {vocab_size - 1}": all(
                0 <= id_ < vocab_size for id_, _ in self.logit_bias
            ),
            "logit_bias must be between -100 and 100 for each token": all(
                -100 <= bias <= 100 for _, bias in self.logit_bias
            ),
            f"first_rank must be below {vocab_size}": self.first_rank < vocab_size,
            "a stop string must not be empty": all(self.stop),
        }
        return next((text for text, is_met in limits.items() if not is_met), None)


# Compared for equality only; the engine does not know what it stands for.
CacheScope = Hashable


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate.

    Attributes:
        prompt_ids: may be empty: generation then starts from `<|endoftext|>`.
        seed: all that sampling depends on besides the distributions. Consecutive seeds give texts that are spread out
            (`arithmetic_code`).
        forced_prefix: bytes that the generated text must begin with (token healing). Tokens that carry nothing else do
            not count towards `max_new_tokens`.
        forced_ids: `forced_prefix` as the tokenizer would encode it. They are prefilled with the prompt: as far as the
            sampled tokens are these, they need no decode steps.
        deadline: `time.monotonic()` time; the sequence ends then with the tokens it has.
        group_size: requests with this prompt and scope that arrive at about the same time, this one included.
        cache_scope: whose cached keys and values the request may use: those of requests with an equal scope. It changes
            what is computed and never the text.
        stream: the tokens are delivered as they are generated.
        echo_logprobs: the log-probabilities of the prompt's tokens, and the likeliest tokens at their positions
            (`top_logprobs`), are part of the result. Prefills the prompt from `echo_from` on.
        echo_from: the first token of the prompt whose log-probability is wanted. What precedes it may be cached.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    forced_prefix: bytes = b""
    forced_ids: tuple[int, ...] = ()
    deadline: float | None = None
    group_size: int = 1
    cache_scope: CacheScope = None
    stream: bool = False
    echo_logprobs: bool = False
    echo_from: int = 0

    def check(self, n_ctx: int, vocab_size: int, *, has_tokenizer: bool) -> None:
        """
        Raises:
            InvalidPrompt: a model with these numbers can never serve it; `ContextExceeded` if it is too long.
        """
        params = self.sampling
        if (problem := params.problem(vocab_size)) is not None:
            raise InvalidPrompt(problem)
        num_prompt = max(1, len(self.prompt_ids)) + len(self.forced_prefix)
        if num_prompt + params.max_new_tokens > n_ctx:
            raise ContextExceeded(
                f"the prompt's tokens ({num_prompt}) and max_new_tokens ({params.max_new_tokens}) exceed the model's "
                f"context (n_ctx: {n_ctx})"
            )
        ids = self.prompt_ids + self.forced_ids
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            raise InvalidPrompt(f"prompt_ids must be between 0 and {vocab_size - 1}")
        if (params.stop or params.single_line or self.forced_prefix) and not has_tokenizer:
            raise InvalidPrompt("stop strings and forced prefixes need a tokenizer, and this model has none")


TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of a prompt, under the model's own distribution.

    Attributes:
        logprobs: log-probability of each token.
        tops: the likeliest tokens at the position of each token.
    """

    logprobs: list[float]
    tops: list[TopLogprobs]


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A generated token. Log-probabilities are under the model's own distribution, before any logits processor.

    Attributes:
        code: the sequence's code after the draw. None if the draw did not change it.
    """

    token_id: int
    logprob: float
    top: TopLogprobs = ()
    code: Code | None = None


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """The result of a sequence: its tokens, why it ended, and how long each phase took.

    Attributes:
        token_ids: all generated tokens, those of the end token or a stop string included. The first `num_forced` carry
            nothing but the forced prefix, those from `num_kept` on begin inside the stop string or behind it: the
            tokens between are the completion.
        finish_reason: length, eos, stop, deadline, cancelled or error.
        cached_tokens: tokens of the prompt that did not have to be computed for this sequence.
        queue_ms: time from submission to the first step.
        prefill_ms: time from the first step to the first token.
        decode_ms: time from the first token to the last.
        prompt_logprobs: log-probabilities of the prompt's tokens from `echo_from` on, if requested; None for the first
            of the prompt. Fewer, or none, if the sequence ended during prefill.
        prompt_tops: the likeliest tokens at the positions of `prompt_logprobs`; None for the first.
        failure: why the sequence ended, if `finish_reason` is error.
        first_token_at: when the first token was drawn, also if it was dropped because none was wanted, in
            `time.monotonic()` time. None if the prompt was not computed.
        ended_at: `time.monotonic()` time.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    tops: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_tops: tuple[TopLogprobs | None, ...] = ()
    failure: EngineFailure | None = None
    num_kept: int = 0
    num_forced: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None
