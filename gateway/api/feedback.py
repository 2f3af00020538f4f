"""`POST /feedback`: how often suggestions of each rank are accepted, and how many characters that saves.

The counts are metrics. Of an answer only its id, its owner, its number of sentences and its latency are kept, and only
of recent answers. Each gateway process knows its own answers: after a reload, feedback on earlier answers is refused.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from typing import ClassVar, get_args, get_type_hints

import falcon

from gateway.api.operation import Answer, Operation, Operations
from gateway.api.schema import FeedbackRequest, parse_feedback_request
from gateway.metrics import Metrics
from shared.errors import FieldError, InvalidJson, InvalidRequest, NotFound

# Recent answers: ten minutes of a hundred writers.
MAX_ANSWERS = 20_000
# Upper bounds of an answer's latency; the label `within_s` has their texts.
LATENCY_BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_WITHIN_S = (*(f"{bound:g}" for bound in LATENCY_BOUNDS_S), "+Inf")
_ACTIONS = get_args(get_type_hints(FeedbackRequest)["action"])
# An answer is one integer, from the lowest bit: its number of sentences, the index of its latency bound, and a bit for
# each sentence and action, set when it is reported.
_COUNT_BITS, _LATENCY_BITS = 4, 3
_REPORTS_AT = _COUNT_BITS + _LATENCY_BITS


class FeedbackStore:
    """Recent answers, and metrics of what writers did with them. Thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        # By the hash of owner and id, which takes less memory than both. Python salts it, so no client can choose an
        # id that collides with an answer of another owner.
        self._answers: OrderedDict[int, int] = OrderedDict()

    def add_answer(self, owner: str, answer_id: str, num_sentences: int, seconds: float) -> None:
        """Remember an answer and count its sentences as shown.

        Args:
            owner: id of the request's API key.
            seconds: the answer's latency.
        """
        latency = bisect_left(LATENCY_BOUNDS_S, seconds)
        with self._lock:
            self._answers[hash((owner, answer_id))] = num_sentences | latency << _COUNT_BITS
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        for rank in range(num_sentences):
            self._metrics.suggestions.labels(action="shown", rank=str(rank), within_s=_WITHIN_S[latency]).inc()

    def record(self, owner: str, feedback: FeedbackRequest) -> None:
        """Count what a writer did with a sentence. A repeated report counts once.

        Raises:
            NotFound: the owner has no such answer, or it is no longer remembered.
            InvalidRequest: the answer has no such sentence.
        """
        key = hash((owner, feedback.id))
        with self._lock:
            answer = self._answers.get(key)
            if answer is None:
                raise NotFound(
                    f"No answer with the id {feedback.id!r} is remembered here; send the id of a recent answer."
                )
            num_sentences = answer & ~(-1 << _COUNT_BITS)
            latency = answer >> _COUNT_BITS & ~(-1 << _LATENCY_BITS)
            if feedback.index >= num_sentences:
                message = f"must be below {num_sentences}, the number of that answer's sentences"
                raise InvalidRequest(f"index {message}.", fields=(FieldError("index", message),))
            report = 1 << _REPORTS_AT + feedback.index * len(_ACTIONS) + _ACTIONS.index(feedback.action)
            if answer & report:
                return
            self._answers[key] = answer | report
        rank, within_s = str(feedback.index), _WITHIN_S[latency]
        self._metrics.suggestions.labels(action=feedback.action, rank=rank, within_s=within_s).inc()
        if feedback.action == "accepted":
            self._metrics.saved_characters.labels(rank=rank, within_s=within_s).inc(feedback.characters)


class FeedbackResource:
    """Answers `POST /feedback` with 204."""

    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag="Completions",
            summary="Report what a writer did with a sentence",
            description="A report may be repeated; it counts once. Answers are remembered for a few minutes.",
            bodies=(parse_feedback_request,),
            examples={"accepted": {"id": "req_4f1c", "index": 0, "action": "accepted", "characters": 42}},
            answers={204: Answer("The report is counted.")},
            errors=(InvalidJson, InvalidRequest, NotFound),
        )
    }

    def __init__(self, feedback_store: FeedbackStore) -> None:
        self._feedback_store = feedback_store

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            InvalidJson, InvalidRequest, NotFound: as `parse_feedback_request` and `FeedbackStore.record`. An answer of
                another owner gets the error of an unknown id.
        """
        self._feedback_store.record(req.context.owner, parse_feedback_request(req.bounded_stream.read()))
        resp.status = falcon.HTTP_204
