"""`POST /feedback`: how often suggestions of each rank are accepted, and how many characters that saves.

The counts are metrics. Of an answer only its id, its owner, its latency, the strategy and usefulness of each sentence
and the reports on it are kept, and only of recent answers. Each gateway process knows its own answers: after a reload,
feedback on earlier answers is refused, and several gateways need a balancer that keeps a session at its gateway.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, NamedTuple, get_args, get_type_hints

import falcon

from gateway.api.operation import Answer, Operation, Operations
from gateway.api.schema import FeedbackRequest, parse_feedback_request
from gateway.metrics import Metrics
from shared.errors import InvalidJson, InvalidRequest, UnknownAnswer, invalid_field

# Upper bounds of an answer's latency; the label `within_s` has their texts.
LATENCY_BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_WITHIN_S = (*(f"{bound:g}" for bound in LATENCY_BOUNDS_S), "+Inf")
# Upper bounds of a prediction's usefulness, and the values of the label `up_to_keys`.
USEFULNESS_BOUNDS_KEYS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
UP_TO_KEYS = (*(f"{bound:g}" for bound in USEFULNESS_BOUNDS_KEYS), "+Inf")
# Recent answers: ten minutes of a hundred writers who request at pauses, half a minute of as many who do at each key.
MAX_ANSWERS = 20_000
# Recent answers with an accepted sentence, on which `kept` is reported later: fifteen minutes of a hundred writers who
# accept one every five seconds.
MAX_ACCEPTED_ANSWERS = 20_000
_ACTIONS = get_args(get_type_hints(FeedbackRequest)["action"])
_KEPT_BIT = 1 << len(_ACTIONS)
# An answer is remembered as bytes, which take less memory than objects: the index of its latency bound, and of each
# sentence what `_SentenceRecord` has.
_SENTENCE = struct.Struct("<BBH")


class _SentenceRecord(NamedTuple):
    """What is remembered of a sentence.

    Attributes:
        bucket: 0 for samples and ideas, else the index of its usefulness bound + 1.
        reports: a bit for each action that is reported, and one for `kept`.
        num_characters: characters that were accepted.
    """

    bucket: int
    reports: int = 0
    num_characters: int = 0

    @property
    def strategy(self) -> str:
        return "predict" if self.bucket else "sample"

    @property
    def up_to_keys(self) -> str | None:
        """None for samples and ideas."""
        return UP_TO_KEYS[self.bucket - 1] if self.bucket else None


class FeedbackStore:
    """Recent answers, and metrics of what writers did with them. Thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._suggestion_counter = cache(metrics.suggestions.labels)
        self._lock = threading.Lock()
        # Answers by the hash of owner and id, which takes less memory than both. Python salts it, so no client can
        # choose an id that collides with an answer of another owner.
        self._answers: OrderedDict[int, bytearray] = OrderedDict()
        # An answer moves here with the first acceptance, so that requests at each key do not displace it.
        self._accepted: OrderedDict[int, bytearray] = OrderedDict()

    def add_answer(self, owner: str, answer_id: str, usefulness: Sequence[float | None], seconds: float) -> None:
        """Remember an answer and count its sentences as shown. One without sentences is not remembered.

        Args:
            owner: id of the request's API key.
            usefulness: each sentence's usefulness in keys. None if it is no prediction.
            seconds: the answer's latency.
        """
        if not usefulness:
            return
        latency = bisect_left(LATENCY_BOUNDS_S, seconds)
        records = [
            _SentenceRecord(0 if keys is None else bisect_left(USEFULNESS_BOUNDS_KEYS, keys) + 1) for keys in usefulness
        ]
        answer = bytearray(b"".join([bytes([latency]), *(_SENTENCE.pack(*record) for record in records)]))
        key = hash((owner, answer_id))
        with self._lock:
            self._accepted.pop(key, None)  # of an earlier answer with the same id, which a client may choose
            _add(self._answers, key, answer, MAX_ANSWERS)
        for rank, record in enumerate(records):
            self._count("shown", record, rank, latency)

    def record(self, owner: str, feedback: FeedbackRequest) -> None:
        """Count what a writer did with a sentence. A repeated report counts once; `kept` may come with a repeated one.

        Raises:
            UnknownAnswer: the owner has no such answer, or it is no longer remembered.
            InvalidRequest: the answer has no such sentence; `kept` with another action than `accepted`, or above the
                number of accepted characters.
        """
        is_accepted = feedback.action == "accepted"
        key, index = hash((owner, feedback.id)), feedback.index
        with self._lock:
            answer = self._answers.get(key, self._accepted.get(key))
            if answer is None:
                raise UnknownAnswer(
                    f"No answer with the id {feedback.id!r} is remembered here; send the id of a recent answer."
                )
            num_sentences = len(answer) // _SENTENCE.size
            if index >= num_sentences:
                raise invalid_field("index", f"must be below {num_sentences}, the number of that answer's sentences")
            before = _SentenceRecord(*_SENTENCE.unpack_from(answer, _offset(index)))
            after = _reported(before, feedback)
            _SENTENCE.pack_into(answer, _offset(index), *after)
            if is_accepted and key in self._answers:
                _add(self._accepted, key, self._answers.pop(key), MAX_ACCEPTED_ANSWERS)
        latency = answer[0]
        new = after.reports & ~before.reports
        if new & _report_bit(feedback.action):
            self._count(feedback.action, after, index, latency)
            if is_accepted:
                self._count_saved(after, index, latency)
        if feedback.kept is not None and new & _KEPT_BIT:
            self._count_kept(after, index, feedback.kept)

    def _count(self, action: str, record: _SentenceRecord, rank: int, latency: int) -> None:
        self._suggestion_counter(action, record.strategy, str(rank), _WITHIN_S[latency]).inc()
        if record.up_to_keys is not None:
            self._metrics.predictions.labels(action=action, up_to_keys=record.up_to_keys).inc()

    def _count_saved(self, record: _SentenceRecord, rank: int, latency: int) -> None:
        self._metrics.saved_characters.labels(
            strategy=record.strategy, rank=str(rank), within_s=_WITHIN_S[latency]
        ).inc(record.num_characters)
        if record.up_to_keys is not None:
            self._metrics.prediction_saved_characters.labels(up_to_keys=record.up_to_keys).inc(record.num_characters)

    def _count_kept(self, record: _SentenceRecord, rank: int, num_characters: int) -> None:
        self._metrics.kept_characters.labels(strategy=record.strategy, rank=str(rank)).inc(num_characters)
        if record.up_to_keys is not None:
            self._metrics.predictions.labels(action="kept", up_to_keys=record.up_to_keys).inc()
            self._metrics.prediction_kept_characters.labels(up_to_keys=record.up_to_keys).inc(num_characters)


def _add(answers: OrderedDict[int, bytearray], key: int, answer: bytearray, max_answers: int) -> None:
    answers[key] = answer
    if len(answers) > max_answers:
        answers.popitem(last=False)


def _reported(record: _SentenceRecord, feedback: FeedbackRequest) -> _SentenceRecord:
    """The record with a report.

    Raises:
        InvalidRequest: `kept` with another action than `accepted`, or above the number of characters of the first
            report on the acceptance.
    """
    if feedback.kept is not None and feedback.action != "accepted":
        raise invalid_field("kept", f"needs the action accepted, not {feedback.action}")
    bit = _report_bit(feedback.action)
    is_first_acceptance = feedback.action == "accepted" and not record.reports & bit
    num_characters = feedback.characters if is_first_acceptance else record.num_characters
    if feedback.kept is not None and feedback.kept > num_characters:
        raise invalid_field(
            "kept", f"must be at most {num_characters}, the characters of that sentence that were accepted"
        )
    kept = 0 if feedback.kept is None else _KEPT_BIT
    return _SentenceRecord(record.bucket, record.reports | bit | kept, num_characters)


def _report_bit(action: str) -> int:
    return 1 << _ACTIONS.index(action)


def _offset(index: int) -> int:
    """Where an answer has a sentence."""
    return 1 + index * _SENTENCE.size


class FeedbackResource:
    """Answers `POST /feedback` with 204."""

    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag="Completions",
            summary="Report what a writer did with a sentence",
            description="A report may be repeated; it counts once. Answers are remembered for a few minutes."
            " Of an accepted sentence, report `characters` at once and, some time later, how many of them are still in"
            " the document: the same `id`, `index` and `action` with `kept`, which counts once and is at most the"
            " `characters` of the first report.",
            bodies=(parse_feedback_request,),
            examples={
                "accepted": {"id": "req_4f1c", "index": 0, "action": "accepted", "characters": 42},
                "still there later": {"id": "req_4f1c", "index": 0, "action": "accepted", "kept": 37},
            },
            answers={204: Answer("The report is counted.")},
            errors=(InvalidJson, InvalidRequest, UnknownAnswer),
        )
    }

    def __init__(self, feedback_store: FeedbackStore) -> None:
        self._feedback_store = feedback_store

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            InvalidJson, InvalidRequest, UnknownAnswer: as `parse_feedback_request` and `FeedbackStore.record`. An
                answer of another owner gets the error of an unknown id.
        """
        self._feedback_store.record(req.context.owner, parse_feedback_request(req.bounded_stream.read()))
        resp.status = falcon.HTTP_204
