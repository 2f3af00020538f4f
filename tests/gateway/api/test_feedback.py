"""Feedback in-process: counted once, by strategy, rank, latency and usefulness; nonsense is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import structs

from gateway.api.feedback import USEFULNESS_BOUNDS_KEYS, FeedbackStore
from gateway.api.schema import FeedbackRequest
from gateway.metrics import Metrics
from shared.errors import InvalidRequest, NotFound
from shared.protocol import Done, GenerateRequest
from tests.gateway.api.conftest import MakeApi
from tests.gateway.exposition import samples, total
from tests.gateway.generation.stubs import TEXTS, Step, completion, three_texts

NUM_ANSWERS = 4000  # in place of the bounds, which it takes seconds to reach


def test_sentences_are_counted_as_shown_and_feedback_once(make_api: MakeApi) -> None:
    api = make_api(three_texts)
    metrics = api.pool.metrics
    answer_id = api.complete(seed=0).json["id"]
    assert [total(metrics, "tercet_suggestions_total", action="shown", rank=str(rank)) for rank in range(3)] == [1] * 3
    accepted = {"id": answer_id, "index": 1, "action": "accepted", "characters": 12}
    for _ in range(2):
        assert api.post("/feedback", accepted).status_code == 204
    assert api.post("/feedback", {**accepted, "action": "ignored"}).status_code == 204
    assert total(metrics, "tercet_suggestions_total", action="accepted", rank="1") == 1
    assert total(metrics, "tercet_suggestions_total", action="ignored", rank="1") == 1
    assert list(samples(metrics, "tercet_saved_characters_total", rank="1").values()) == [12]


def test_feedback_on_an_unknown_answer_or_sentence_is_refused(make_api: MakeApi) -> None:
    api = make_api(three_texts)
    unknown = api.post("/feedback", {"id": "none", "index": 0, "action": "accepted"})
    assert (unknown.status_code, unknown.json["code"]) == (404, "not_found")
    assert "'none'" in unknown.json["detail"]
    answer_id = api.complete(seed=0, n_samples=1).json["id"]
    beyond = api.post("/feedback", {"id": answer_id, "index": 1, "action": "accepted"})
    assert (beyond.status_code, beyond.json["errors"][0]["field"]) == (422, "index")
    assert "must be below 1" in beyond.json["detail"]


def test_a_refused_request_shows_no_suggestion(make_api: MakeApi) -> None:
    api = make_api(three_texts)
    api.complete(length=0)
    assert samples(api.pool.metrics, "tercet_suggestions_total") == {}


def feedback(answer_id: str, index: int = 0, action: str = "accepted", **fields: Any) -> FeedbackRequest:
    return FeedbackRequest(id=answer_id, index=index, action=action, **fields)  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(dict, lambda: 0)


@pytest.fixture
def store(metrics: Metrics) -> FeedbackStore:
    return FeedbackStore(metrics)


def test_every_sentence_and_action_is_reported_for_itself(store: FeedbackStore, metrics: Metrics) -> None:
    for seconds in (0.01, 0.7, 60):
        store.add_answer("owner", f"answer-{seconds}", [None] * 8, seconds)
        for _ in range(2):
            for index in range(8):
                for action in get_args(get_type_hints(FeedbackRequest)["action"]):
                    store.record("owner", feedback(f"answer-{seconds}", index, action))
    for bound in ("0.05", "1", "+Inf"):
        counts = samples(metrics, "tercet_suggestions_total", within_s=bound)
        assert list(counts.values()) == [1] * 8 * 4  # with `shown`
    assert total(metrics, "tercet_suggestions_total") == 3 * 8 * 4


def test_an_answer_of_another_owner_is_unknown(store: FeedbackStore) -> None:
    store.add_answer("first", "a", [None], 0.1)
    details = []
    for owner, answer_id in (("second", "a"), ("", "a"), ("first", "b")):
        with pytest.raises(NotFound) as caught:
            store.record(owner, feedback(answer_id))
        details.append(caught.value.detail.replace(repr(answer_id), "ID"))
    assert len(set(details)) == 1
    store.record("first", feedback("a"))


@pytest.fixture
def fewer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_ANSWERS", "MAX_ACCEPTED_ANSWERS"):
        monkeypatch.setattr(f"gateway.api.feedback.{name}", NUM_ANSWERS)


@pytest.mark.usefixtures("fewer_answers")
def test_the_oldest_answers_are_forgotten_and_memory_is_bounded(store: FeedbackStore) -> None:
    """Also with long ids that clients chose."""
    tracemalloc.start()
    try:
        for number in range(NUM_ANSWERS + 100):
            store.add_answer("owner", f"{number:064}", [0.3] * 3, 0.3)
            if number % 8 == 0:
                store.record("owner", feedback(f"{number:064}", action="ignored"))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes < 250 * NUM_ANSWERS, used_bytes
    store.record("owner", feedback(f"{100:064}"))
    with pytest.raises(NotFound):
        store.record("owner", feedback(f"{99:064}"))


@pytest.mark.usefixtures("fewer_answers")
def test_an_acceptance_is_remembered_while_requests_at_each_key_displace_other_answers(
    store: FeedbackStore, metrics: Metrics
) -> None:
    """Else no client could report `kept` after the time that it takes to know."""
    store.add_answer("owner", "taken", [1.5, 0.4], 0.1)
    store.record("owner", feedback("taken", characters=9))
    for number in range(NUM_ANSWERS + 1):
        store.add_answer("owner", f"{number}", [0.3], 0.1)
    store.record("owner", feedback("taken", kept=7))
    assert samples(metrics, "tercet_kept_characters_total") == {("0", "predict"): 7}
    for number in range(NUM_ANSWERS):
        store.add_answer("owner", f"{number}", [0.3], 0.1)
        store.record("owner", feedback(f"{number}"))
    with pytest.raises(NotFound):
        store.record("owner", feedback("taken", index=1))


@pytest.mark.usefixtures("fewer_answers")
def test_an_answer_without_sentences_shows_nothing_and_displaces_no_other(
    store: FeedbackStore, metrics: Metrics
) -> None:
    store.add_answer("owner", "a", [None], 0.1)
    for number in range(NUM_ANSWERS + 1):
        store.add_answer("owner", f"{number}", [], 0.1)
    store.record("owner", feedback("a"))
    assert total(metrics, "tercet_suggestions_total", action="shown") == 1


def test_an_id_that_is_used_again_means_the_new_answer(store: FeedbackStore, metrics: Metrics) -> None:
    """Clients may choose ids."""
    for kept in (4, 5):
        store.add_answer("owner", "a", [None], 0.1)
        store.record("owner", feedback("a", characters=5))
        store.record("owner", feedback("a", kept=kept))
    assert list(samples(metrics, "tercet_kept_characters_total").values()) == [9]


@pytest.mark.parametrize("has_first_report", [True, False])
def test_kept_characters_count_once_with_the_acceptance_or_later(
    store: FeedbackStore, metrics: Metrics, has_first_report: bool
) -> None:
    store.add_answer("owner", "a", [None, None], 0.1)
    if has_first_report:
        store.record("owner", feedback("a", 1, characters=12))
    for kept in (8, 3):
        store.record("owner", feedback("a", 1, characters=12, kept=kept))
    store.record("owner", feedback("a", 1, characters=99))
    assert samples(metrics, "tercet_kept_characters_total") == {("1", "sample"): 8}
    assert list(samples(metrics, "tercet_saved_characters_total").values()) == [12]
    assert total(metrics, "tercet_suggestions_total", action="accepted") == 1


def test_more_characters_than_were_accepted_cannot_be_kept(store: FeedbackStore, metrics: Metrics) -> None:
    """The first report says how many; a refused report changes nothing."""
    store.add_answer("owner", "a", [None, None], 0.1)
    store.record("owner", feedback("a", characters=10_000))
    store.record("owner", feedback("a", kept=10_000))
    for characters, kept in ((4, 5), (0, 1)):
        with pytest.raises(InvalidRequest, match=r"kept must be at most \d") as caught:
            store.record("owner", feedback("a", 1, characters=characters, kept=kept))
        assert [error.field for error in caught.value.fields] == ["kept"]
    store.record("owner", feedback("a", 1, characters=4, kept=4))
    assert list(samples(metrics, "tercet_kept_characters_total").values()) == [10_000, 4]


@pytest.mark.parametrize("action", ["rejected", "ignored"])
def test_only_accepted_characters_can_be_kept(make_api: MakeApi, action: str) -> None:
    api = make_api(three_texts)
    answer_id = api.complete(seed=0).json["id"]
    refused = api.post("/feedback", {"id": answer_id, "index": 0, "action": action, "kept": 0})
    assert (refused.status_code, refused.json["errors"][0]["field"]) == (422, "kept")
    assert refused.json["detail"] == f"kept needs the action accepted, not {action}."


def test_predictions_are_counted_by_usefulness(store: FeedbackStore, metrics: Metrics) -> None:
    usefulness = [0.0, 0.25, 0.26, *USEFULNESS_BOUNDS_KEYS[-3:], 8.5, 1e9]
    store.add_answer("owner", "a", usefulness, 0.1)
    store.record("owner", feedback("a", 7, characters=20))
    store.record("owner", feedback("a", 7, kept=15))
    store.record("owner", feedback("a", 2, "rejected"))
    assert samples(metrics, "tercet_predictions_total") == {
        ("shown", "0.25"): 2,
        ("shown", "0.5"): 1,
        ("shown", "2"): 1,
        ("shown", "4"): 1,
        ("shown", "8"): 1,
        ("shown", "+Inf"): 2,
        ("accepted", "+Inf"): 1,
        ("kept", "+Inf"): 1,
        ("rejected", "0.5"): 1,
    }
    assert samples(metrics, "tercet_prediction_saved_characters_total") == {("+Inf",): 20}
    assert samples(metrics, "tercet_prediction_kept_characters_total") == {("+Inf",): 15}
    assert samples(metrics, "tercet_suggestions_total", strategy="sample") == {}


def test_strategy_and_usefulness_are_those_of_the_request(make_api: MakeApi) -> None:
    def predict(request: GenerateRequest) -> Iterator[Step]:
        assert request.predict is not None
        for step in completion(request, TEXTS[request.predict.rank]):
            yield structs.replace(step, usefulness=0.4 + request.predict.rank) if isinstance(step, Done) else step

    api = make_api(predict)
    answer_id = api.complete(strategy="predict").json["id"]
    assert (
        api.post("/feedback", {"id": answer_id, "index": 0, "action": "accepted", "characters": 5}).status_code == 204
    )
    # The most useful has rank 0.
    found = samples(api.pool.metrics, "tercet_predictions_total")
    assert found.keys() == {("shown", "0.5"), ("shown", "2"), ("shown", "4"), ("accepted", "4")}
