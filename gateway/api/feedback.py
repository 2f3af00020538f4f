"""What became of the suggestions: how often the first, second and third are taken, and what that saves.

Counts alone are kept, in the metrics; of each answer only its id, how many sentences it had and how long it took,
and of the newest only. Another gateway process (after a reload) does not know the ids of this one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import falcon

from gateway.api.schema import FeedbackRequest, parse_feedback_request
from gateway.metrics import Metrics
from shared.errors import FieldError, InvalidRequest, NotFound

# Answers remembered: an hour of a hundred writers.
MAX_ANSWERS = 100_000
# Within so many seconds an answer came; the last is for all that were later.
LATENCIES = ("0.05", "0.1", "0.2", "0.5", "1", "+Inf")


@dataclass(slots=True)
class _Answer:
    num_sentences: int
    latency: str
    told: set[tuple[int, str]] = field(default_factory=set)


class FeedbackStore:
    """Remembers answers for a while, and counts what is said of them. Thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, _Answer] = OrderedDict()

    def note(self, answer_id: str, num_sentences: int, seconds: float) -> None:
        """An answer with so many sentences is being shown."""
        latency = next(bound for bound in LATENCIES if seconds <= float(bound))
        with self._lock:
            self._answers[answer_id] = _Answer(num_sentences, latency)
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        for rank in range(num_sentences):
            self._metrics.suggestions.labels(action="shown", rank=str(rank), within_s=latency).inc()

    def take(self, feedback: FeedbackRequest) -> None:
        """Count what a writer did; the same said twice counts once.

        Raises:
            NotFound: no such answer is remembered.
            InvalidRequest: it had no such sentence.
        """
        with self._lock:
            answer = self._answers.get(feedback.id)
            if answer is None:
                raise NotFound(
                    f"No answer with the id {feedback.id!r} is remembered here; send the id of a recent one."
                )
            if feedback.index >= answer.num_sentences:
                message = f"must be below {answer.num_sentences}, the number of that answer's sentences"
                raise InvalidRequest(f"index {message}.", fields=(FieldError("index", message),))
            said = (feedback.index, feedback.action)
            if said in answer.told:
                return
            answer.told.add(said)
        rank, within_s = str(feedback.index), answer.latency
        self._metrics.suggestions.labels(action=feedback.action, rank=rank, within_s=within_s).inc()
        if feedback.action == "accepted":
            self._metrics.saved_characters.labels(rank=rank, within_s=within_s).inc(feedback.characters)


class FeedbackResource:
    """`POST /feedback`: what a writer did with a suggestion."""

    def __init__(self, feedback_store: FeedbackStore) -> None:
        self._ledger = feedback_store

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._ledger.take(parse_feedback_request(req.bounded_stream.read()))
        resp.status = falcon.HTTP_204
