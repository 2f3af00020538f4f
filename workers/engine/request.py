"""The engine's input and output as plain values.

Token ids, seconds and counts. Does not know tensors, the device and the wire.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from workers.engine.arithmetic_code import Code
from workers.engine.failures import EngineFailure

# Biases are applied at each draw, in the engine's thread.
MAX_BIASED_TOKENS = 1024
# Paths that a step ranks.
MAX_PATH_RANK = 15


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one sequence are sampled, and when it ends."""

    max_new_tokens: int = 20  # 0: the prompt is computed, for its log-probabilities, and nothing is generated
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 50  # 0 disables
    top_p: float = 0.95  # 0 and 1 disable
    min_p: float = 0.0  # 0 disables
    typical_p: float = 1.0  # 0 and 1 disable
    repetition_penalty: float = 1.0  # 1 disables
    frequency_penalty: float = 0.0  # 0 disables
    presence_penalty: float = 0.0  # 0 disables
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), each id once
    stop: tuple[str, ...] = ()
    single_line: bool = False  # a line break is a stop string
    first_rank: int = 0  # greedy only: the first token with new text is the one with this rank among the likeliest
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
    def has_count_penalty(self) -> bool:
        """Whether a logit depends on how often its token was generated."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    def problem(self, vocab_size: int) -> str | None:
        """Which value is out of its range, for a model with this vocabulary; None if all are valid."""
        limits = {
            "max_new_tokens must not be negative": self.max_new_tokens >= 0,
            "temperature must be finite and not negative": 0 <= self.temperature < float("inf"),
            "top_k must not be negative": self.top_k >= 0,
            "top_p must be between 0 and 1": 0 <= self.top_p <= 1,
            "min_p must be between 0 and 1": 0 <= self.min_p <= 1,
            "typical_p must be between 0 and 1": 0 <= self.typical_p <= 1,
            "repetition_penalty must be finite and positive": 0 < self.repetition_penalty < float("inf"),
            "frequency_penalty must be between -2 and 2": -2 <= self.frequency_penalty <= 2,
            "presence_penalty must be between -2 and 2": -2 <= self.presence_penalty <= 2,
            f"logit_bias must name at most {MAX_BIASED_TOKENS} tokens": len(self.logit_bias) <= MAX_BIASED_TOKENS,
            "logit_bias must name a token once": len({id_ for id_, _ in self.logit_bias}) == len(self.logit_bias),
            f"logit_bias must name token ids between 0 and {vocab_size - 1}": all(
                0 <= id_ < vocab_size for id_, _ in self.logit_bias
            ),
            "logit_bias must be between -100 and 100 for each token": all(
                -100 <= bias <= 100 for _, bias in self.logit_bias
            ),
            f"first_rank must be between 0 and {vocab_size - 1}": 0 <= self.first_rank < vocab_size,
            f"path_rank must be between 0 and {MAX_PATH_RANK}": 0 <= (self.path_rank or 0) <= MAX_PATH_RANK,
            "path_rank needs temperature 0": self.path_rank is None or self.temperature == 0,
            "min_logprob must not be positive": (self.min_logprob or 0.0) <= 0,
            f"top_logprobs must be between 0 and {vocab_size}": 0 <= self.top_logprobs <= vocab_size,
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
