"""`POST /autocomplete`, the editor's route: the contract of Write With Transformer, kept and extended.

Translates between HTTP and the dialect, which `autocompletion` knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

import falcon
import msgspec
from msgspec import structs

from gateway.api import sse
from gateway.api.autocompletion import Autocompletion, sentence
from gateway.api.callers import SESSION_PARAMETER, caller_of, prefers_async
from gateway.api.error_formats import PROBLEM_DETAILS
from gateway.api.feedback import FeedbackStore
from gateway.api.jobs import ERRORS_OF_JOBS, JOB_ACCEPTED, JOB_HEADERS, JobResponse, JobSubmitter
from gateway.api.operation import COMPLETION_ERRORS, JSON, Answer, Events, Operation, Operations
from gateway.api.schema import AutocompleteResponse, SentenceEvent, TokenEvent, parse_autocomplete_request
from gateway.generation.request import RequestContext
from gateway.generation.request_starter import RequestStarter
from gateway.generation.selection import SelectionResult, Suggestion
from gateway.generation.suggestions import StartedRequest, TextDelta
from shared.errors import Problem, Superseded, UnknownModel

_encode = msgspec.json.Encoder().encode


class AutocompleteResource:
    """Answers `POST /autocomplete`, at once or as server-sent events."""

    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag="Completions",
            summary="Complete a text",
            description="Answers up to `n_samples` sentences that continue `context`, best first; none if no"
            " completion was worth showing. The body is parsed as"
            " JSON, whatever its `Content-Type`. Before a `suffix`, sentences end where they run into it, and those"
            " that fit best come first. With `stream`, errors after the first event are its last event.",
            bodies=(parse_autocomplete_request,),
            examples={
                "three sentences": {"context": "The old man looked at the sea and"},
                "a gap": {"context": "The old man looked at ", "suffix": " and said nothing."},
                "a line, streamed": {"context": "Dear Sir or ", "single_line": True, "stream": True},
            },
            parameters=(SESSION_PARAMETER, *JOB_HEADERS),
            answers={
                200: Answer(
                    "The sentences. `partial`: some branches failed, as `errors` says. For the `Idempotency-Key`"
                    " of an earlier job: the job, if it is final.",
                    {
                        JSON: (AutocompleteResponse, JobResponse),
                        sse.CONTENT_TYPE: Events(
                            {
                                "token": TokenEvent,
                                "sentence": SentenceEvent,
                                "done": AutocompleteResponse,
                                "error": Problem,
                            }
                        ),
                    },
                ),
                202: JOB_ACCEPTED,
            },
            errors=(*COMPLETION_ERRORS, UnknownModel, Superseded, *ERRORS_OF_JOBS),
        )
    }

    def __init__(
        self,
        starter: RequestStarter,
        autocompletion: Autocompletion,
        feedback_store: FeedbackStore,
        submitter: JobSubmitter | None = None,
    ) -> None:
        """
        Args:
            submitter: None: there are no jobs.
        """
        self._starter = starter
        self._autocompletion = autocompletion
        self._feedback_store = feedback_store
        self._submitter = submitter

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """As `respond`; with `Prefer: respond-async` the answer is a job."""
        body = req.bounded_stream.read()
        if self._submitter is None or not prefers_async(req):
            self.respond(req, resp, body)
            return
        request = parse_autocomplete_request(body)
        self._autocompletion.check(request, caller_of(req))
        self._submitter.respond(req, resp, request, body)
        resp.set_header("Preference-Applied", "respond-async")

    def respond(self, req: falcon.Request, resp: falcon.Response, body: bytes) -> None:
        """Answer a request's body.

        Raises:
            InvalidJson, InvalidRequest, UnknownModel: the request is wrong.
            QuotaExceeded, Overloaded, NotReady, Superseded, ClientGone: it was not started, or cancelled.
            NoCompletion, DeadlineExceeded, InvalidRequest: it has no completion. A stream has begun then: the error is
                its last event.
        """
        started_at = time.monotonic()
        caller = caller_of(req)
        with ExitStack() as stack:
            stack.enter_context(self._starter.counting(caller))
            request = parse_autocomplete_request(body)
            started = stack.enter_context(self._autocompletion.started(caller, request, started_at))
            respond = partial(self._respond, req.context, started.context, started_at)
            if request.stream:
                events = _encoded(started, respond)
                sse.stream(resp, events, PROBLEM_DETAILS, req.context.id, stack.pop_all().close)
                return
            result = started.result()
        resp.data = _encode(respond(result)) + b"\n"  # a terminal's prompt should start on a new line

    def _respond(
        self, log: falcon.Context, context: RequestContext, started_at: float, result: SelectionResult
    ) -> AutocompleteResponse:
        """The whole answer; also fills in what the middleware logs, and remembers the answer for feedback.

        Raises:
            TercetError: as `Autocompletion.response`.
        """
        response = self._autocompletion.response(context.spec, result, started_at)
        now = time.monotonic()
        if response.sentences:
            slowest = max(response.sentences, key=lambda sentence: sentence.time)
            log.timing = {"queue": slowest.queue_ms, "prefill": slowest.prefill_ms, "decode": slowest.decode_ms}
        log.log = {
            "model": response.model,
            "context_chars": context.num_prompt_chars,
            "sentences": len(response.sentences),
            "partial": result.is_partial,
            "top_ups": context.num_top_ups,
            # Time for trimming, selection and replacements, after the first branches had finished.
            "added_ms": round(1e3 * (now - (context.first_outcomes_at or now)), 2),
        }
        usefulness = [sentence.usefulness for sentence in response.sentences]
        self._feedback_store.add_answer(log.owner, response.id, usefulness, response.time)
        return response


def _encoded(started: StartedRequest, respond: Callable[[SelectionResult], AutocompleteResponse]) -> Iterator[bytes]:
    """A stream's events; the whole answer is the last."""
    spec = started.context.spec
    for event in started.events():
        if isinstance(event, TextDelta):
            yield sse.event("token", TokenEvent(branch=event.branch, text=event.text))
        elif isinstance(event, Suggestion):
            fields = structs.asdict(sentence(spec, event))
            yield sse.event("sentence", SentenceEvent(branch=event.result.branch, **fields))
        else:
            yield sse.event("done", respond(event))
