"""`POST /autocomplete` in-process: the whole app, with stub workers behind it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import structlog
from falcon import testing
from msgspec import structs

from gateway.generation.request import MAX_DRAWN_SEED
from gateway.generation.trimming import IDEA_TOKENS, MIN_TOKENS
from shared.protocol import Accepted, Done, GenerateRequest
from tests.gateway.api.conftest import Api, MakeApi
from tests.gateway.generation.stubs import TEXTS, Respond, Step, completion, hang, make_done, three_texts


def always(text: str, finish_reason: str = "eos") -> Respond:
    return lambda request: completion(request, text, finish_reason=finish_reason)


def events_of(body: str) -> list[tuple[str, Any]]:
    events = []
    for block in body.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def test_an_answer_has_the_sentences_best_first_and_says_how_they_were_made(make_api: MakeApi) -> None:
    response = make_api(three_texts).complete(seed=0)
    assert response.status_code == 200
    body = response.json
    assert list(body) == ["id", "model", "seed", "sentences", "time", "partial", "errors"]
    assert (body["id"], body["model"], body["seed"]) == (response.headers["x-request-id"], "small", 0)
    assert (body["partial"], body["errors"]) == (False, [])
    first, *_ = body["sentences"]
    assert [sentence["value"] for sentence in body["sentences"]] == [TEXTS[1], TEXTS[2], TEXTS[0]]
    assert [sentence["seed"] for sentence in body["sentences"]] == [1, 2, 0]
    assert 0 < first.pop("time") <= body["time"]
    assert first == {
        "value": TEXTS[1],
        "score": -1.0,
        "finish_reason": "eos",
        "seed": 1,
        "slot": 0,
        "model": "small",
        "tokens": 4,
        "cached_tokens": 2,
        "queue_ms": 0.5,
        "prefill_ms": 1.0,
        "decode_ms": 2.0,
    }
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert (timing["queue"], timing["prefill"], timing["decode"]) == ("0.50", "1.00", "2.00")


def fills(request: GenerateRequest) -> Iterator[Step]:
    """A text that needs no trimming, whose fit is higher for higher seeds; none fits of every fifth."""
    yield Accepted()
    text = f" the door{request.seed} " if request.seed % 5 else ""
    fit = float(request.seed) if text else None
    yield make_done([text, " and", " left"], text=text, ends=[len(text)] * 3, fit=fit, finish_reason="stop")


@pytest.mark.parametrize("strategy", ["sample", "predict"])
def test_before_a_suffix_the_best_fits_come_first_as_the_worker_cut_them(make_api: MakeApi, strategy: str) -> None:
    api = make_api(fills)
    body = api.complete(seed=1, suffix=" and left.", strategy=strategy).json
    values = [" the door3 ", " the door2 ", " the door1 "]
    assert [sentence["value"] for sentence in body["sentences"]] == values
    streamed = events_of(api.complete(seed=1, suffix=" and left.", strategy=strategy, stream=True).text)
    texts = {data["branch"]: data["text"] for name, data in streamed if name == "token"}
    assert texts == dict(enumerate(reversed(values)))
    assert [sentence["value"] for sentence in streamed[-1][1]["sentences"]] == values
    calls = api.pool.workers[0].calls
    assert {(call.suffix, call.stream, call.predict is not None) for call in calls} == {
        (" and left.", False, strategy == "predict")
    }


def test_a_sentence_without_a_fit_is_replaced(make_api: MakeApi) -> None:
    api = make_api(fills)
    body = api.complete(seed=4, suffix=" and left.").json
    assert [sentence["seed"] for sentence in body["sentences"]] == [7, 6, 4]
    body = api.complete(seed=5, n_samples=1, suffix=" and left.", strategy="predict").json
    assert [error["code"] for error in body["errors"]] == ["no_prediction"]


def test_defaults_leave_room_for_the_new_tokens_and_finish_a_word(make_api: MakeApi) -> None:
    api = make_api(three_texts)
    for fields, num_prompt_tokens in (({}, 256), ({"max_tokens": 64}, 64)):
        api.pool.workers[0].calls.clear()
        api.complete(seed=0, length=1, **fields)
        assert {call.sampling.max_new_tokens for call in api.pool.workers[0].calls} == {MIN_TOKENS}
        assert {call.max_prompt_tokens for call in api.pool.workers[0].calls} == {num_prompt_tokens}


def test_an_idea_may_take_more_tokens_and_is_cut_where_its_sentence_ends(make_api: MakeApi) -> None:
    api = make_api(always(" the sea was calm and he could see the boat. It went away and he", "length"))
    body = api.complete(strategy="idea", length=8, n_samples=1).json
    assert [sentence["value"] for sentence in body["sentences"]] == [" the sea was calm and he could see the boat."]
    api.complete(strategy="idea", length=8, n_samples=1, suffix=" and left.")
    calls = [(call.sampling.max_new_tokens, call.score_prior) for call in api.pool.workers[0].calls]
    assert calls == [(8 + IDEA_TOKENS, True), (8, False)]


def test_without_cleaning_completions_are_answered_as_the_model_made_them(make_api: MakeApi) -> None:
    text = " the sea the sea the sea the sea the sea, an"
    api = make_api(lambda request: completion(request, text, finish_reason="length"))
    body = api.complete(clean=False, length=12, n_samples=2).json
    assert [sentence["value"] for sentence in body["sentences"]] == [text, text]
    assert (body["partial"], body["errors"]) == (False, [])
    calls = api.pool.workers[0].calls
    assert [(call.heal, call.sampling.max_new_tokens) for call in calls] == [(False, 12)] * 2


def test_a_drawn_seed_is_reported_differs_and_repeats_the_answer(make_api: MakeApi) -> None:
    api = make_api(three_texts)
    bodies = [api.complete().json for _ in range(3)]
    assert len({body["seed"] for body in bodies}) == 3
    for body in bodies:
        assert 0 <= body["seed"] < MAX_DRAWN_SEED
        again = api.complete(seed=body["seed"]).json
        seeds = [[sentence["seed"] for sentence in answer["sentences"]] for answer in (body, again)]
        assert seeds[0] == seeds[1]


def test_a_prediction_asks_each_branch_for_another_rank(make_api: MakeApi) -> None:
    """What would save too little is held back."""

    def predict(request: GenerateRequest) -> Iterator[Step]:
        assert request.predict is not None
        text, usefulness = [(" sea", 0.5), (" gull on", 2.0), ("", 0.0)][request.predict.rank]
        for step in completion(request, text):
            yield structs.replace(step, usefulness=usefulness) if isinstance(step, Done) else step

    api = make_api(predict, settings={"predict_temperature": "1.5", "min_usefulness": "0.6"})
    body = api.complete(strategy="predict", temperature=0.3).json
    calls = [call.predict for call in api.pool.workers[0].calls]
    assert sorted(call.rank for call in calls if call) == [0, 1, 2]
    assert {(call.temperature, call.is_verbatim) for call in calls if call} == {(1.5, False)}
    assert [(each["value"], each["usefulness"]) for each in body["sentences"]] == [(" gull on", 2.0)]
    assert {error["code"]: "TERCET_MIN_USEFULNESS" in error["detail"] for error in body["errors"]} == {
        "not_useful": True,
        "no_prediction": False,
    }
    assert not body["partial"]


def test_a_correction_replaces_what_was_typed_and_is_never_a_delta(make_api: MakeApi) -> None:
    def correct(request: GenerateRequest) -> Iterator[Step]:
        assert request.predict is not None
        assert request.predict.corrects
        for step in completion(request, "government"):
            yield structs.replace(step, replaces=6) if isinstance(step, Done) else step

    answer = make_api(correct).complete(strategy="predict", corrections=True, n_samples=1, stream=True)
    [*deltas, (sentence, data), (_, whole)] = events_of(answer.text)
    assert (deltas, sentence, data["value"], data["replaces"]) == ([], "sentence", "government", 6)
    assert [each["replaces"] for each in whole["sentences"]] == [6]


def test_at_temperature_zero_branches_start_from_different_ranks_and_a_loop_is_an_answer(make_api: MakeApi) -> None:
    api = make_api(always(" the the the the"))
    assert api.complete(temperature=0).json["sentences"][0]["value"] == " the the the the"
    assert {call.sampling.first_rank for call in api.pool.workers[0].calls} >= {0, 1, 2}


def test_an_explanation_has_the_tokens_of_the_sentence(make_api: MakeApi) -> None:
    api = make_api(always(" the sea grew ca", "length"))
    [sentence] = api.complete(n_samples=1, explain=2).json["sentences"]
    assert sentence["value"] == " the sea grew"
    assert sentence["explanation"] == [
        {"text": text, "logprob": -1.0, "likeliest": [[text, -1.0]]} for text in (" the", " sea", " grew")
    ]
    assert [call.logprobs for call in api.pool.workers[0].calls] == [2]


def test_a_length_that_leaves_no_room_for_a_prompt_is_refused(make_api: MakeApi) -> None:
    response = make_api(three_texts, n_ctx=32).complete(length=32)
    assert (response.status_code, response.json["errors"][0]["field"]) == (422, "length")


@contextmanager
def open_stream(api: Api, **fields: Any) -> Iterator[tuple[dict[str, str], Iterator[bytes]]]:
    """A streamed answer's headers, and its body part by part, closed at the block's end, as gunicorn does."""
    body = json.dumps({"context": "He saw", "stream": True, **fields}).encode()
    environ = testing.create_environ(
        "/autocomplete", method="POST", body=body, headers={"Host": "localhost", "Content-Length": str(len(body))}
    )
    headers: dict[str, str] = {}

    def start_response(status: str, pairs: list[tuple[str, str]], exc_info: object = None) -> Callable[[bytes], object]:
        headers.update((name.lower(), value) for name, value in pairs)
        return lambda _: None

    stream: Any = api.app(environ, start_response)
    try:
        yield headers, iter(stream)
    finally:
        stream.close()


@contextmanager
def held_request(api: Api, **fields: Any) -> Iterator[Future[testing.Result]]:
    """A request that occupies all of the first slot until the block ends; then its client hangs up."""
    ours, peer = socket.socketpair()
    with ours, ThreadPoolExecutor(1) as threads, peer:
        body = {"context": "He saw", **fields}
        response = threads.submit(api.post, "/autocomplete", body, extras={"gunicorn.socket": ours})
        api.pool.workers[0].wait(lambda worker: len(worker.calls) == 3)
        yield response


def test_a_client_that_hangs_up_ends_its_branches(make_api: MakeApi) -> None:
    api = make_api(hang)
    with held_request(api) as response:
        pass
    assert (response.result().status_code, response.result().json["code"]) == (499, "client_gone")
    api.pool.workers[0].wait(lambda worker: worker.num_hangups == 3)
    api.pool.wait_until_idle()


def test_a_stream_has_text_deltas_then_sentences_then_the_whole_answer(make_api: MakeApi) -> None:
    is_received = [threading.Event() for _ in range(3)]

    def waits(request: GenerateRequest) -> Iterator[Step]:
        *tokens, done = three_texts(request)
        yield from tokens
        assert is_received[request.seed].wait(5)  # so that text comes before its branch has ended
        yield done

    events = []
    with open_stream(make_api(waits), seed=0) as (headers, body):
        for part in body:
            [event] = events_of(part.decode())
            events.append(event)
            if event[0] == "token":
                is_received[event[1]["branch"]].set()
    assert headers["content-type"] == "text/event-stream"
    assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-store, no-transform")
    assert events[-1][0] == "done"
    done = events[-1][1]
    assert list(done) == ["id", "model", "seed", "sentences", "time", "partial", "errors"]
    assert done["id"] == headers["x-request-id"]
    assert [data["branch"] for name, data in events if name == "sentence"] == [0, 1, 2]
    for position, (name, data) in enumerate(events):
        if name == "sentence":
            branch = data["branch"]
            assert {key: value for key, value in data.items() if key != "branch"} in done["sentences"]
            assert text_of(events[:position], branch) == data["value"] == TEXTS[branch]
            assert text_of(events[position:], branch) == ""


def text_of(events: list[tuple[str, Any]], branch: int) -> str:
    return "".join(data["text"] for name, data in events if name == "token" and data["branch"] == branch)


def test_a_stream_that_its_reader_leaves_ends_its_branches(make_api: MakeApi) -> None:
    api = make_api(hang)
    with open_stream(api):
        api.pool.workers[0].wait(lambda worker: len(worker.calls) == 3)
    api.pool.workers[0].wait(lambda worker: worker.num_hangups == 3)
    api.pool.wait_until_idle()


def test_the_log_has_figures_but_no_prompt(make_api: MakeApi) -> None:
    api = make_api(always(" the sea was calm."))
    with structlog.testing.capture_logs() as logged:
        api.post("/autocomplete", {"context": "a secret prompt"})
    [line] = [line for line in logged if "top_ups" in line]
    assert (line["model"], line["context_chars"], line["sentences"], line["partial"]) == ("small", 15, 1, False)
    assert line["top_ups"] == 6
    assert line["added_ms"] >= 0
    assert "secret" not in str(logged)
