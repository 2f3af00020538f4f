"""Feedback in-process: counted once, by rank and latency; nonsense is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
