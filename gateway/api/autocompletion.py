"""`/autocomplete`'s dialect: from its requests to generation's specs, and from results to its answers.

Knows no HTTP: a resource answers at once or as a stream, a job later. It does not know how completions are made.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from gateway.api.fields import MAX_SENT_SEED, sampling_of
from gateway.api.schema import (
    AutocompleteRequest,
    AutocompleteResponse,
    FailedBranch,
    PredictedWord,
    Sentence,
    TokenExplanation,
    parse_autocomplete_request,
)
from gateway.generation.request import Caller, GenerationSpec, cut_suffix, resolve_seed
from gateway.generation.request_starter import RequestStarter
from gateway.generation.selection import (
    SelectionPolicy,
    SelectionResult,
    Suggestion,
    are_rejections,
    no_completion_error,
    selection_policy,
)
from gateway.generation.suggestions import StartedRequest
from gateway.generation.trimming import IDEA_TOKENS, MIN_TOKENS
from gateway.jobs.store import Job
from shared.cancellation import Cancelling
from shared.errors import invalid_field
from shared.protocol import MAX_SCORED_TOKENS, Done, Prediction

# Prompt tokens, where the request does not say.
DEFAULT_MAX_TOKENS = 256
# By this, clients mean as many tokens as there is room for.
ALL = -1
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class PredictionSettings:
    """Which predicted words are shown.

    Attributes:
        temperature: calibrates the probabilities of predicted words.
        min_usefulness: keys that a prediction should save, to be shown.
    """

    temperature: float = 1.0
    min_usefulness: float = 0.0


class Autocompletion:
    """Starts requests and renders their results."""

    def __init__(
        self, starter: RequestStarter, similarity: float, prediction: PredictionSettings, min_familiarity: float
    ) -> None:
        """
        Args:
            similarity: percent from which two sentences are near-duplicates.
            prediction: settings of requests whose strategy is `predict`.
            min_familiarity: score of a prompt from which requests with `familiar_only` are answered, in nats per
                character.
        """
        self._starter = starter
        self._similarity = similarity
        self._prediction = prediction
        self._min_familiarity = min_familiarity

    def check(self, request: AutocompleteRequest, caller: Caller) -> None:
        """
        Raises:
            UnknownModel, InvalidRequest: a field is out of the range that the plan or the model allows.
        """
        self._spec(request, caller, time.monotonic())

    def started(
        self, caller: Caller, request: AutocompleteRequest, started_at: float
    ) -> AbstractContextManager[StartedRequest]:
        """Start a request, which ends with the block.

        Args:
            started_at: when it arrived, of `time.monotonic()`.

        Raises:
            UnknownModel, InvalidRequest: as `check`.
            TercetError: as `RequestStarter.started`.
        """
        spec = self._spec(request, caller, started_at)
        return self._starter.started(spec, self._policy(request, spec))

    def response(self, spec: GenerationSpec, result: SelectionResult, started_at: float) -> AutocompleteResponse:
        """The whole answer.

        Raises:
            NoCompletion, DeadlineExceeded, InvalidRequest: there is no completion. If all were rejected, the answer is
                whole and has no sentence: another attempt would end alike.
        """
        if not result.suggestions and not are_rejections(result.failures):
            raise no_completion_error(result.failures, faster="allow a longer max_time or a shorter length")
        return AutocompleteResponse(
            id=spec.request_id,
            model=spec.model,
            seed=spec.seed,
            sentences=[sentence(spec, suggestion) for suggestion in result.suggestions],
            time=round(time.monotonic() - started_at, 4),
            partial=result.is_partial,
            errors=[
                FailedBranch(branch=failure.branch, code=failure.code, detail=failure.detail)
                for failure in result.failures
            ],
        )

    def compute(self, job: Job, cancelling: Cancelling) -> bytes:
        """Return the answer to a job, as JSON.

        Raises:
            TercetError: as `AutocompleteResource.respond`.
        """
        # Its queue bounds a key's jobs; the key's concurrency is left to requests that wait.
        caller = Caller(request_id=job.id, owner=job.owner, max_concurrency=0, cancelling=cancelling, is_job=True)
        started_at = time.monotonic()
        request = parse_autocomplete_request(job.request)
        with self._starter.counting(caller), self.started(caller, request, started_at) as started:
            result = started.result()
        return _encode(self.response(started.context.spec, result, started_at))

    def _policy(self, request: AutocompleteRequest, spec: GenerationSpec) -> SelectionPolicy:
        return msgspec.structs.replace(
            selection_policy(spec, self._similarity, request.length),
            min_usefulness=self._prediction.min_usefulness if request.strategy == "predict" else None,
            min_probability=request.min_probability,
            is_idea=_is_idea(request),
            rejects_chat=_is_idea(request) and self._starter.served_model(request.model_size, "model_size").is_chat,
            min_familiarity=self._min_familiarity if request.familiar_only else None,
        )

    def _spec(self, request: AutocompleteRequest, caller: Caller, started_at: float) -> GenerationSpec:
        """
        Raises:
            UnknownModel, InvalidRequest: a field is out of the range that the plan or the model allows.
        """
        model = self._starter.model(request.model_size, "model_size")
        deadline = self._starter.deadline(started_at, request.max_time)
        max_prompt_tokens = model.n_ctx - _num_new_tokens(request)
        if max_prompt_tokens < 1:
            raise invalid_field("length", f"must be below {model.n_ctx}, the context of {model.name}")
        if request.max_tokens is not None and request.max_tokens > max_prompt_tokens:
            raise invalid_field(
                "max_tokens",
                f"must be at most {max_prompt_tokens}: {model.name} has room for {model.n_ctx} tokens, length included",
            )
        if request.max_tokens == 0:
            raise invalid_field("max_tokens", f"must be 1 to {max_prompt_tokens}, or -1, not 0")
        if request.seed is not None and request.seed > MAX_SENT_SEED:
            raise invalid_field("seed", f"must be at most {MAX_SENT_SEED}")
        max_tokens = max_prompt_tokens if request.max_tokens == ALL else request.max_tokens
        return GenerationSpec(
            caller=caller,
            model=model.name,
            sampling=sampling_of(request, _num_new_tokens(request), model.vocab_size),
            prompts=(request.context,),
            max_prompt_tokens=max_tokens or min(DEFAULT_MAX_TOKENS, max_prompt_tokens),
            num_completions=request.n_samples,
            deadline=deadline,
            seed=resolve_seed(request.seed),
            session=request.session or caller.session,
            heals=request.clean,
            ranks_first_token=True,
            special_as_text=True,
            num_scored_tokens=MAX_SCORED_TOKENS if request.familiar_only else 0,
            scores_prior=_is_idea(request),
            num_top_logprobs=request.explain,
            is_streamed=request.stream,
            sequence=request.sequence,
            predict=Prediction(
                temperature=self._prediction.temperature, is_verbatim=not request.clean, corrects=request.corrections
            )
            if request.strategy == "predict"
            else None,
            suffix=cut_suffix(request.suffix),
        )


def _num_new_tokens(request: AutocompleteRequest) -> int:
    return (max(request.length, MIN_TOKENS) if request.clean else request.length) + IDEA_TOKENS * _is_idea(request)


def _is_idea(request: AutocompleteRequest) -> bool:
    """Whether its sentences end as ideas do: not before a `suffix`, where they end as they fit."""
    return request.strategy == "idea" and request.clean and not cut_suffix(request.suffix)


def sentence(spec: GenerationSpec, suggestion: Suggestion) -> Sentence:
    """A suggestion as the dialect shows it."""
    result = suggestion.result
    done = result.done
    return Sentence(
        value=suggestion.text,
        time=round(result.time_s, 4),
        score=suggestion.score,
        finish_reason=done.finish_reason,
        seed=result.seed,
        slot=result.slot,
        model=result.model,
        tokens=suggestion.num_tokens,
        cached_tokens=done.cached_tokens,
        queue_ms=round(done.queue_ms, 2),
        prefill_ms=round(done.prefill_ms, 2),
        decode_ms=round(done.decode_ms, 2),
        usefulness=done.usefulness,
        probability=done.words[-1].probability if done.words else None,
        words=_words(done),
        replaces=done.replaces,
        explanation=_explanation(done, suggestion.num_tokens) if spec.num_top_logprobs is not None else None,
    )


def _words(done: Done) -> list[PredictedWord] | None:
    if not done.words:
        return None
    begins = [0, *(word.end for word in done.words[:-1])]
    return [
        PredictedWord(text=done.text[begin : word.end], probability=word.probability)
        for begin, word in zip(begins, done.words, strict=True)
    ]


def _explanation(done: Done, num_tokens: int) -> list[TokenExplanation]:
    kept = slice(done.num_typed_tokens, done.num_typed_tokens + num_tokens)
    return [
        TokenExplanation(text=text, logprob=logprob, likeliest=[(top.text, top.logprob) for top in tops])
        for text, logprob, tops in zip(
            (done.token_texts or [])[kept], done.logprobs[kept], (done.tops or [])[kept], strict=True
        )
    ]
