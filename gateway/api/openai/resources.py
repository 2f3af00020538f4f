"""OpenAI's completions API: `POST /v1/completions`, `GET /v1/models`, and errors in its shape.

Translates between that schema and generation's specs and results. Completions are what the model said: no healing,
trimming or selection, unless the request asks with `clean`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

import falcon
import msgspec

from gateway.api import sse
from gateway.api.callers import SESSION_PARAMETER, caller_of
from gateway.api.openai import choices
from gateway.api.openai.error_format import OPENAI_ERRORS, branch_error
from gateway.api.openai.request import completion_spec, resolve
from gateway.api.openai.schema import (
    Choice,
    Completion,
    CompletionRequest,
    ErrorBody,
    ModelCard,
    ModelList,
    Usage,
    parse_completion_request,
)
from gateway.api.operation import COMPLETION_ERRORS, JSON, Answer, Events, Operation, Operations, Parameter
from gateway.generation.request import RequestContext
from gateway.generation.request_starter import RequestStarter
from gateway.generation.selection import SelectionResult, Suggestion, selection_policy
from gateway.generation.suggestions import Output, TextDelta
from shared.errors import (
    PromptTooLong,
    Superseded,
    UnknownModel,
)
from shared.plan import Model

_encode = msgspec.json.Encoder().encode


class CompletionsResource:
    """Answers `POST /v1/completions`, at once or as server-sent events."""

    error_format = OPENAI_ERRORS
    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag="OpenAI",
            summary="Complete texts, as OpenAI's API does",
            description="Without `echo`, a text prompt that is too long for the model and `max_tokens` loses its"
            " beginning; `usage.prompt_tokens` says how much was used. `max_tokens` beyond the context is lowered to"
            " half of it, with a warning. With `echo`, or as token ids, it is an error."
            " Fields of vLLM, llama.cpp and others that Tercet lacks are ignored; `warnings` names those that would"
            " have changed the answer."
            " An empty prompt starts a text. Prompt `i` has the choices from `i·n` on. Seeds count from `seed` for each"
            " prompt. With `stream`, chunks end with `data: [DONE]`; an error after the first chunk is the last event,"
            " and `echo` of token ids or with `logprobs` sends each choice as a whole, as `clean` and `suffix` do."
            " Completions before a `suffix` end where they run into it; `logprobs` has all generated tokens. Unless"
            " streamed, the choices of a prompt are in the order of how well they fit.",
            bodies=(parse_completion_request,),
            examples={
                "a text": {"prompt": "The old man looked at the sea and", "n": 3},
                "log-probabilities of token ids": {
                    "prompt": [[464, 1468, 582]],
                    "max_tokens": 1,
                    "logprobs": 1,
                    "echo": True,
                    "temperature": 0,
                },
                "a stream": {"prompt": "She opened", "stream": True, "stream_options": {"include_usage": True}},
            },
            parameters=(SESSION_PARAMETER,),
            answers={
                200: Answer(
                    "The completions.",
                    {JSON: Completion, sse.CONTENT_TYPE: Events({"": (Completion, ErrorBody, Literal["[DONE]"])})},
                )
            },
            errors=(*COMPLETION_ERRORS, PromptTooLong, UnknownModel, Superseded),
        )
    }

    def __init__(self, starter: RequestStarter, similarity: float) -> None:
        """
        Args:
            similarity: percent from which two completions are near-duplicates, for `clean`.
        """
        self._starter = starter
        self._similarity = similarity

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """As `respond`."""
        self.respond(req, resp, req.bounded_stream.read())

    def respond(self, req: falcon.Request, resp: falcon.Response, body: bytes) -> None:
        """Answer a request's body. A stream begins when there is something to send, so that an error before that has
        its own status.

        Raises:
            InvalidJson, InvalidRequest, PromptTooLong, UnknownModel: the request is wrong.
            QuotaExceeded, Overloaded, NotReady, Superseded, ClientGone: it was not started, or cancelled.
            NoCompletion, DeadlineExceeded: a branch has no completion.
        """
        started_at = time.monotonic()
        caller = caller_of(req)
        with ExitStack() as stack:
            stack.enter_context(self._starter.counting(caller))
            parsed = parse_completion_request(body)
            req.context.num_ignored = parsed.num_unknown
            model = self._starter.model(parsed.request.model, "model")
            request, warnings = resolve(parsed.request, model)
            spec = completion_spec(request, model, self._starter, caller, started_at)
            policy = selection_policy(spec, self._similarity, request.max_tokens)
            started = stack.enter_context(self._starter.started(spec, policy))
            answer = _Answer(request, [*parsed.warnings, *warnings], started.context, req.context)
            if request.stream:
                chunks = sse.begun(answer.chunks(started.events()))
                sse.stream(resp, chunks, OPENAI_ERRORS, req.context.id, stack.pop_all().close)
                return
            result = started.result()
        resp.data = _encode(answer.whole(result)) + b"\n"


class _Answer:
    """Renders a started request's outputs."""

    def __init__(
        self, request: CompletionRequest, warnings: list[str], context: RequestContext, log: falcon.Context
    ) -> None:
        """
        Args:
            warnings: what was ignored or changed.
            log: receives what the middleware logs.
        """
        self._request = request
        self._context = context
        self._spec = context.spec
        self._log = log
        self._id = f"cmpl-{self._spec.request_id}"
        self._created = int(time.time())
        self._warnings: dict[str, Any] = {"warnings": warnings} if warnings else {}
        # State of a stream: branches of which a part was sent, and choices that were sent as a whole.
        self._begun: set[int] = set()
        self._num_whole = 0

    def check(self, result: SelectionResult) -> None:
        """
        Raises:
            InvalidRequest, PromptTooLong, DeadlineExceeded, NoCompletion: a choice is missing. With `clean`: all are.
        """
        if result.failures and not (self._request.clean and result.suggestions):
            raise branch_error(result.failures)

    def whole(self, result: SelectionResult) -> Completion:
        """The answer as one object.

        Raises:
            TercetError: as `check`.
        """
        self.check(result)
        request, spec = self._request, self._spec
        selected = result.suggestions if request.clean else choices.best(spec, result.suggestions, request.n)
        self._finish(result)
        return self._completion(
            [choices.choice(spec, index, suggestion) for index, suggestion in enumerate(selected)],
            usage=self._usage(result),
            **self._warnings,
        )

    def chunks(self, outputs: Iterator[Output]) -> Iterator[bytes]:
        """The events of a stream.

        Raises:
            TercetError: as `check`.
        """
        options = self._request.stream_options
        has_usage = options is not None and bool(options.include_usage)
        fields: dict[str, Any] = {"usage": None} if has_usage else {}
        warnings = self._warnings  # with the first chunk
        for output in outputs:
            if isinstance(output, SelectionResult):
                self.check(output)
                self._finish(output)
                if has_usage:
                    yield self._chunk({"usage": self._usage(output)})
            elif (part := self._part(output)) is not None:
                yield self._chunk(fields | warnings, part)
                warnings = {}
        yield b"data: [DONE]\n\n"

    def _part(self, output: TextDelta | Suggestion) -> Choice | None:
        """What a stream sends for an output."""
        request, spec = self._request, self._spec
        if isinstance(output, TextDelta):
            index = output.branch
            prefix = choices.echoed_text(spec, index) if spec.echoes and index not in self._begun else ""
            self._begun.add(index)
            part = choices.part(index, output, prefix=prefix, has_logprobs=request.logprobs is not None)
            return part if part.text or part.logprobs else None
        index = output.result.branch
        if request.clean:  # which leaves branches out, and sends each choice as a whole
            index, self._num_whole = self._num_whole, self._num_whole + 1
        last = choices.choice(spec, index, output)
        if index in self._begun:
            last.text, last.logprobs = "", None
        return last

    def _usage(self, result: SelectionResult) -> Usage:
        return choices.usage(self._spec, result.suggestions)

    def _chunk(self, fields: dict[str, Any], *parts: Choice) -> bytes:
        return sse.event(None, self._completion(list(parts), **fields))

    def _completion(self, parts: list[Choice], **fields: Any) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._spec.model, choices=parts, **fields)

    def _finish(self, result: SelectionResult) -> None:
        """Fill in what the middleware logs."""
        slowest = max(result.suggestions, key=lambda suggestion: suggestion.result.time_s).result.done
        self._log.timing = {"queue": slowest.queue_ms, "prefill": slowest.prefill_ms, "decode": slowest.decode_ms}
        self._log.log = {
            "model": self._spec.model,
            "context_chars": self._context.num_prompt_chars,
            "sentences": len(result.suggestions),
            "partial": result.is_partial,
        }


class ModelsResource:
    """Answers `GET /v1/models`."""

    error_format = OPENAI_ERRORS
    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag="OpenAI", summary="The models being served", answers={200: Answer("All.", {JSON: ModelList})}
        )
    }

    def __init__(self, starter: RequestStarter) -> None:
        self._models = starter.models
        self._created = int(time.time())

    def card(self, model: Model) -> ModelCard:
        return ModelCard(id=model.name, created=self._created, max_model_len=model.n_ctx)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = _encode(ModelList(data=[self.card(model) for model in self._models.all()])) + b"\n"


class ModelResource:
    """Answers `GET /v1/models/{model}`."""

    error_format = OPENAI_ERRORS
    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag="OpenAI",
            summary="A model being served",
            parameters=(Parameter("model", "path", "its name"),),
            answers={200: Answer("The model.", {JSON: ModelCard})},
            errors=(UnknownModel,),
        )
    }

    def __init__(self, starter: RequestStarter, models: ModelsResource) -> None:
        self._starter = starter
        self._models = models

    def on_get(self, req: falcon.Request, resp: falcon.Response, model: str) -> None:
        """
        Raises:
            UnknownModel: it is not served.
        """
        resp.data = _encode(self._models.card(self._starter.served_model(model, "model"))) + b"\n"
