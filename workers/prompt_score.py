"""How well a model knows a text: the mean log-probability of the characters at the end of a prompt.

By it the gateway tells text that the model can continue from text in a language that it does not know. The scored
tokens are a prompt of their own, so the score depends on them alone, and the prompt's cached keys and values stay as
they are. So are the tokens of an idea, which is scored without its prompt: the gateway ranks ideas by the difference
that the prompt makes. Knows the engine and the codec; does not know HTTP, and how the branch makes its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import structs

from shared.protocol import FINISH_REASONS, Done, GenerateLine, GenerateRequest, Token
from workers.codec import Codec
from workers.engine.engine import Engine
from workers.engine.failures import EngineNotReady
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput
from workers.engine.sequence import ResultStream

# Fewer tokens say too little: a name alone is as unlikely as a foreign word.
MIN_TOKENS = 8
# Of a character, in nats: one emoji in a sentence, of four unlikely tokens, says nothing about its language.
MIN_LOGPROB = -4.0


class AnyBranch(Protocol):
    """The interface of a submitted request; `workers.service.Branch` says what its methods do."""

    def __iter__(self) -> Iterator[list[GenerateLine]]: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class ChangedBranch:
    """A branch whose lines are changed one by one. With the interface of `workers.service.Branch`."""

    branch: AnyBranch

    def __iter__(self) -> Iterator[list[GenerateLine]]:
        for lines in self.branch:
            yield [self.changed(line) for line in lines]

    def changed(self, line: GenerateLine) -> GenerateLine:
        raise NotImplementedError

    def cancel(self) -> None:
        self.branch.cancel()

    def close(self) -> None:
        self.cancel()
        self.branch.close()


@dataclass(slots=True, eq=False)
class ScoredBranch(ChangedBranch):
    """Its first line with text says how well the model knows the end of its prompt."""

    codec: Codec
    engine_request: EngineRequest
    results: ResultStream
    _is_scored: bool = field(init=False, default=False)

    def changed(self, line: GenerateLine) -> GenerateLine:
        is_first = not self._is_scored and isinstance(line, Token)
        if not is_first and not isinstance(line, Done):
            return line
        self._is_scored = True
        return structs.replace(line, prompt_score=prompt_score(self.codec, self.engine_request, self.results.result()))

    def cancel(self) -> None:
        self.branch.cancel()
        self.results.cancel()


@dataclass(slots=True, eq=False)
class PriorBranch(ChangedBranch):
    """Its last line says how likely its tokens are without the prompt, unless the deadline passes first."""

    engine: Engine
    engine_request: EngineRequest
    _results: ResultStream | None = field(init=False, default=None)

    def changed(self, line: GenerateLine) -> GenerateLine:
        if not isinstance(line, Done) or not line.token_ids or line.finish_reason not in FINISH_REASONS:  # cancelled
            return line
        request = echo_request((self.engine.start_id, *line.token_ids), self.engine_request)
        try:
            [self._results] = self.engine.submit_group([request], is_follow_up=True)
        except EngineNotReady:  # it drains
            return line
        logprobs = [logprob for logprob in self._results.result().prompt_logprobs if logprob is not None]
        return structs.replace(line, prior_logprobs=logprobs) if len(logprobs) == len(line.token_ids) else line

    def cancel(self) -> None:
        self.branch.cancel()
        if self._results is not None:
            self._results.cancel()


def scored(branch: AnyBranch, request: GenerateRequest, engine: Engine, codec: Codec, now: float) -> AnyBranch:
    """`branch`, with the score of the last `request.score_last` tokens of its prompt if there are enough of them.

    Args:
        now: when the request arrived, in seconds of `time.monotonic()`.

    Raises:
        EngineNotReady: the engine drains, so the branch is cancelled.
    """
    whole = codec.request(request, now)
    ids = whole.prompt_ids[-request.score_last - 1 :]  # the first has nothing before it
    if len(ids) <= MIN_TOKENS:
        return branch
    engine_request = echo_request(ids, whole)
    try:
        [results] = engine.submit_group([engine_request], is_follow_up=True)
    except EngineNotReady:
        branch.cancel()
        raise
    return ScoredBranch(branch, codec, engine_request, results)


def echo_request(
    ids: tuple[int, ...], own: EngineRequest, *, echo_from: int = 0, max_new_tokens: int = 0
) -> EngineRequest:
    """What computes the log-probabilities of tokens, of a branch with the request `own`."""
    return EngineRequest(
        ids,
        SamplingParams(max_new_tokens, temperature=0.0),
        seed=0,
        deadline=own.deadline,
        cache_scope=own.cache_scope,
        echo_logprobs=True,
        echo_from=echo_from,
    )


def prompt_score(codec: Codec, engine_request: EngineRequest, output: SequenceOutput) -> float | None:
    """The score in nats per character of words. None if the deadline passed first, or if few tokens are of words."""
    logprobs = [logprob for logprob in output.prompt_logprobs if logprob is not None]
    if not logprobs:
        return None
    ids = engine_request.prompt_ids[-len(logprobs) :]
    score = codec.word_logprob(ids, logprobs, MIN_LOGPROB, MIN_TOKENS)
    return None if score is None else round(score, 3)
