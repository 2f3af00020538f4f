"""`POST /feedback`: how often suggestions of each rank are accepted, and how many characters that saves.

The counts are metrics. Of an answer only its id, its number of sentences and its latency are kept, and only of recent
answers. Each gateway process knows its own answers: after a reload, feedback on earlier answers is refused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import falcon

from gateway.api.schema import FeedbackRequest, parse_feedback_request
from gateway.metrics import Metrics
from shared.errors import FieldError, InvalidRequest, NotFound

# Recent answers: an hour of a hundred writers.
MAX_ANSWERS = 100_000
# Upper bounds of an answer's latency, values of the label `within_s`.
LATENCY_BOUNDS_S = ("0.05", "0.1", "0.2", "0.5", "1", "+Inf")


@dataclass(slots=True)
class _Answer:
    num_sentences: int
    within_s: str
    reports: set[tuple[int, str]] = field(default_factory=set)  # sentence index, action


class FeedbackStore:
    """Recent answers, and metrics of what writers did with them. Thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, _Answer] = OrderedDict()

    def add_answer(self, answer_id: str, num_sentences: int, seconds: float) -> None:
        """Remember an answer and count its sentences as shown.

        Args:
            seconds: the answer's latency.
        """
        within_s = next(bound for bound in LATENCY_BOUNDS_S if seconds <= float(bound))
        with self._lock:
            self._answers[answer_id] = _Answer(num_sentences, within_s)
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        for rank in range(num_sentences):
            self._metrics.suggestions.labels(action="shown", rank=str(rank), within_s=within_s).inc()

    def record(self, feedback: FeedbackRequest) -> None:
        """Count what a writer did with a sentence. A repeated report counts once.

        Raises:
            NotFound: the answer is unknown or no longer remembered.
            InvalidRequest: the answer has no such sentence.
        """
        with self._lock:
            answer = self._answers.get(feedback.id)
            if answer is None:
                raise NotFound(
                    f"No answer with the id {feedback.id!r} is remembered here; send the id of a recent answer."
                )
            if feedback.index >= answer.num_sentences:
                message = f"must be below {answer.num_sentences}, the number of that answer's sentences"
                raise InvalidRequest(f"index {message}.", fields=(FieldError("index", message),))
            report = (feedback.index, feedback.action)
            if report in answer.reports:
                return
            answer.reports.add(report)
        rank, within_s = str(feedback.index), answer.within_s
        self._metrics.suggestions.labels(action=feedback.action, rank=rank, within_s=within_s).inc()
        if feedback.action == "accepted":
            self._metrics.saved_characters.labels(rank=rank, within_s=within_s).inc(feedback.characters)


class FeedbackResource:
    """Answers `POST /feedback` with 204."""

    def __init__(self, feedback_store: FeedbackStore) -> None:
        self._feedback_store = feedback_store

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            InvalidJson, InvalidRequest, NotFound: as `parse_feedback_request` and `FeedbackStore.record`.
        """
        self._feedback_store.record(parse_feedback_request(req.bounded_stream.read()))
        resp.status = falcon.HTTP_204
