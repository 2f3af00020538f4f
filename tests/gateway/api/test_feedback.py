"""Feedback in-process: counted once, by rank and latency; nonsense is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import get_args, get_type_hints

import pytest

from gateway.api.feedback import MAX_ANSWERS, FeedbackStore
from gateway.api.schema import FeedbackRequest
from gateway.metrics import Metrics
from shared.errors import NotFound
from shared.protocol import GenerateRequest
from tests.gateway.api.conftest import Api
from tests.gateway.generation.stubs import Step, completion

TEXTS = [" the sea was calm.", " a gull flying over", " nothing but sand"]


def respond(request: GenerateRequest) -> Iterator[Step]:
    yield from completion(request, TEXTS[request.seed % 3])


def counts(api: Api, metric: str) -> dict[tuple[str, str], float]:
    """Of each label pair (action, rank), whatever the latency."""
    found: dict[tuple[str, str], float] = {}
    for line in api.pool.exposition():
        if line.startswith(f"{metric}{{"):
            labels = dict(pair.split("=") for pair in line[line.index("{") + 1 : line.index("}")].split(","))
            key = (labels.get("action", "").strip('"'), labels["rank"].strip('"'))
            found[key] = found.get(key, 0.0) + float(line.split()[-1])
    return found


def test_sentences_are_counted_as_shown_and_feedback_once(make_api: Callable[..., Api]) -> None:
    api = make_api(respond)
    answer_id = api.complete(seed=0).json["id"]
    assert counts(api, "tercet_suggestions_total") == {("shown", "0"): 1, ("shown", "1"): 1, ("shown", "2"): 1}
    accepted = {"id": answer_id, "index": 1, "action": "accepted", "characters": 12}
    for _ in range(2):
        assert api.post("/feedback", accepted).status_code == 204
    assert api.post("/feedback", {**accepted, "action": "ignored"}).status_code == 204
    found = counts(api, "tercet_suggestions_total")
    assert (found["accepted", "1"], found["ignored", "1"]) == (1, 1)
    assert counts(api, "tercet_saved_characters_total") == {("", "1"): 12}


def test_feedback_on_an_unknown_answer_or_sentence_is_refused(make_api: Callable[..., Api]) -> None:
    api = make_api(respond)
    unknown = api.post("/feedback", {"id": "none", "index": 0, "action": "accepted"})
    assert (unknown.status_code, unknown.json["code"]) == (404, "not_found")
    assert "'none'" in unknown.json["detail"]
    answer_id = api.complete(seed=0, n_samples=1).json["id"]
    beyond = api.post("/feedback", {"id": answer_id, "index": 1, "action": "accepted"})
    assert (beyond.status_code, beyond.json["errors"][0]["field"]) == (422, "index")
    assert "must be below 1" in beyond.json["detail"]


def test_a_refused_request_shows_no_suggestion(make_api: Callable[..., Api]) -> None:
    api = make_api(respond)
    api.complete(length=0)
    assert counts(api, "tercet_suggestions_total") == {}


def feedback(answer_id: str, index: int = 0, action: str = "accepted") -> FeedbackRequest:
    return FeedbackRequest(id=answer_id, index=index, action=action)  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(list, lambda: 0)


def test_every_sentence_and_action_is_reported_for_itself(metrics: Metrics) -> None:
    store = FeedbackStore(metrics)
    for seconds in (0.01, 0.7, 60):
        store.add_answer("owner", f"answer-{seconds}", 8, seconds)
        for _ in range(2):
            for index in range(8):
                for action in get_args(get_type_hints(FeedbackRequest)["action"]):
                    store.record("owner", feedback(f"answer-{seconds}", index, action))
    lines = [line for line in metrics.exposition().decode().splitlines() if line.startswith("tercet_suggestions_total")]
    assert len(lines) == 3 * 8 * 4  # with `shown`
    assert {line.split()[-1] for line in lines} == {"1.0"}
    for bound in ("0.05", "1", "+Inf"):
        assert sum(f'within_s="{bound}"' in line for line in lines) == 8 * 4


def test_an_answer_of_another_owner_is_unknown(metrics: Metrics) -> None:
    store = FeedbackStore(metrics)
    store.add_answer("first", "a", 1, 0.1)
    details = []
    for owner, answer_id in (("second", "a"), ("", "a"), ("first", "b")):
        with pytest.raises(NotFound) as caught:
            store.record(owner, feedback(answer_id))
        details.append(caught.value.detail.replace(repr(answer_id), "ID"))
    assert len(set(details)) == 1
    store.record("first", feedback("a"))


def test_the_oldest_answers_are_forgotten_and_memory_is_bounded(metrics: Metrics) -> None:
    """Also with long ids that clients chose."""
    store = FeedbackStore(metrics)
    tracemalloc.start()
    try:
        for number in range(MAX_ANSWERS + 100):
            store.add_answer("owner", f"{number:064}", 1, 0.3)
            if number % 8 == 0:
                store.record("owner", feedback(f"{number:064}"))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes < 5_000_000, used_bytes
    store.record("owner", feedback(f"{100:064}"))
    with pytest.raises(NotFound):
        store.record("owner", feedback(f"{99:064}"))
