"""The worker's HTTP face over a real service: embedded checkpoint, fp32, in this process, no server and no socket.

Texts and log-probabilities are compared with those of transformers.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import falcon
import pytest
import torch
from falcon import testing
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer, GPT2LMHeadModel

from shared.errors import PROBLEM_JSON
from shared.hangups import HangupWatcher
from shared.plan import Model, Slot
from shared.protocol import GenerateRequest
from tests.workers.helpers import EMBEDDED, PATIENCE_S, wait_until
from workers.app import create_app
from workers.engine.engine import EngineConfig
from workers.gunicorn_worker import HoldingSocket
from workers.service import Branch, SlotService

PROMPT = "The old man looked at the sea and"
GREEDY = {"max_new_tokens": 8, "temperature": 0.0}
HANGUPS = HangupWatcher()


def make_service(directory: Path = EMBEDDED, *, max_batch: int = 4, step_delay_s: float = 0.0) -> SlotService:
    slot = Slot(index=3, device="cpu", model="embedded", socket="", max_batch=max_batch)
    model = Model(name="embedded", directory=str(directory), source="embedded", n_ctx=1024, vocab_size=8192)
    config = EngineConfig(dtype="fp32", max_batch=max_batch, hang_s=0.0, step_delay_s=step_delay_s)

    def fail(error: BaseException) -> None:
        raise error

    return SlotService(slot, model, config, Path("unused"), on_fatal=fail)


@contextmanager
def warm_service(**settings: Any) -> Iterator[SlotService]:
    service = make_service(**settings)
    service.start(age=7)
    wait_until(lambda: service.is_warm)
    try:
        yield service
    finally:
        assert service.close()


@pytest.fixture(scope="module")
def client() -> Iterator[testing.TestClient]:
    with warm_service() as service:
        yield testing.TestClient(create_app(service, HANGUPS))


@pytest.fixture(scope="module")
def reference() -> Any:
    return GPT2LMHeadModel.from_pretrained(EMBEDDED, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED)


def generate(client: testing.TestClient, **fields: Any) -> list[dict[str, Any]]:
    """The answer's lines."""
    result = client.simulate_post("/generate", json=fields)
    assert result.status == falcon.HTTP_200, result.text
    assert result.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in result.text.splitlines()]


@contextmanager
def open_stream(
    client: testing.TestClient, path: str, sock: Any = None, **fields: Any
) -> Iterator[Iterator[dict[str, Any]]]:
    """The answer's lines as they come; closes the response at the end, as a WSGI server does."""
    with open_body(client, path, sock, **fields) as body:
        yield (json.loads(line) for chunk in body for line in chunk.splitlines())


@contextmanager
def open_body(client: testing.TestClient, path: str, sock: Any = None, **fields: Any) -> Iterator[Iterator[bytes]]:
    environ = testing.create_environ(
        path, method="POST" if fields else "GET", body=json.dumps(fields) if fields else ""
    )
    if sock is not None:
        environ["gunicorn.socket"] = sock
    start_response = testing.StartResponseMock()
    body: Any = client.app(environ, start_response)
    assert start_response.status == falcon.HTTP_200
    try:
        yield iter(body)
    finally:
        body.close()


def problem(result: testing.Result) -> dict[str, Any]:
    assert result.headers["content-type"] == PROBLEM_JSON
    body: dict[str, Any] = result.json
    assert body["status"] == result.status_code
    return body


def metric(client: testing.TestClient, name: str, **labels: str) -> float:
    """A sample of the slot's metrics, 0 if it is absent."""
    text = client.simulate_get("/metrics").text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    found = [sample.value for sample in samples if (sample.name, sample.labels) == (name, {"slot": "3", **labels})]
    return found[0] if found else 0.0


# Answers -----------------------------------------------------------------------------------------


def test_greedy_text_is_that_of_transformers(
    client: testing.TestClient, reference: Any, reference_tokenizer: Any
) -> None:
    accepted, done = generate(client, prompt=PROMPT, sampling=GREEDY)
    ids = reference_tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        expected = reference.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[
            0, ids.shape[1] :
        ].tolist()
    assert accepted == {"event": "accepted"}
    assert done["event"] == "done"
    assert done["token_ids"] == expected
    assert done["text"] == reference_tokenizer.decode(expected)
    assert (done["finish_reason"], done["num_prompt_tokens"]) == ("length", ids.shape[1])
    assert done["ends"][-1] == len(done["text"])


def test_a_stream_is_the_answer_token_by_token(client: testing.TestClient) -> None:
    _, whole = generate(client, prompt=PROMPT, sampling=GREEDY)
    accepted, *tokens, done = generate(client, prompt=PROMPT, sampling=GREEDY, stream=True)
    assert accepted == {"event": "accepted"}
    assert {token["event"] for token in tokens} == {"token"}
    assert [token["token_id"] for token in tokens] == done["token_ids"] == whole["token_ids"]
    assert "".join(token["text"] for token in tokens) == done["text"] == whole["text"]


def test_a_healed_prompt_streams_only_new_text(client: testing.TestClient) -> None:
    prompt = "The old man looked at the se"
    _, *tokens, done = generate(client, prompt=prompt, heal=True, sampling=GREEDY, stream=True)
    assert done["num_typed_tokens"] + len(tokens) <= len(done["token_ids"]) + 1
    assert "".join(token["text"] for token in tokens) == done["text"]
    assert not done["text"].startswith(" se")


def test_echo_and_logprobs_are_those_of_transformers(client: testing.TestClient, reference: Any) -> None:
    _, done = generate(client, prompt=PROMPT, sampling=GREEDY, echo=True, logprobs=2)
    ids = torch.tensor([done["prompt_ids"] + done["token_ids"]])
    with torch.inference_mode():
        expected = reference(ids).logits[0].log_softmax(-1)
    num_prompt = done["num_prompt_tokens"]
    picked = [float(expected[index - 1, ids[0, index]]) for index in range(1, ids.shape[1])]
    assert done["prompt_logprobs"][0] is None
    assert done["prompt_logprobs"][1:] == pytest.approx(picked[: num_prompt - 1], abs=1e-3)
    assert done["logprobs"] == pytest.approx(picked[num_prompt - 1 :], abs=1e-3)
    for index, top in enumerate(done["tops"]):
        best = expected[num_prompt - 1 + index].topk(2)
        assert [token_id for token_id, _, _ in top] == best.indices.tolist()
        assert [logprob for _, _, logprob in top] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert "".join(done["token_texts"]) == done["text"]


def test_prompt_ids_are_used_as_sent_and_cut_at_their_start(client: testing.TestClient) -> None:
    _, whole = generate(client, prompt_ids=[5, 6, 7, 8], sampling=GREEDY, echo=True)
    _, cut = generate(client, prompt_ids=[5, 6, 7, 8], max_prompt_tokens=2, sampling=GREEDY, echo=True)
    assert (whole["prompt_ids"], cut["prompt_ids"]) == ([5, 6, 7, 8], [7, 8])


def test_a_stop_string_ends_the_text_before_it(client: testing.TestClient) -> None:
    _, free = generate(client, prompt=PROMPT, sampling=GREEDY)
    stop = free["text"].split()[1]
    _, done = generate(client, prompt=PROMPT, sampling={**GREEDY, "stop": [stop]})
    assert done["finish_reason"] == "stop"
    assert done["text"] == free["text"].partition(stop)[0]


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "code", "detail"),
    [
        ("{", 400, "invalid_json", "JSON"),
        ("[]", 400, "invalid_json", "an array"),
        ('{"prompt": "a", "tempo": 3}', 422, "invalid_request", "tempo"),
        ("{}", 422, "invalid_request", "one of prompt and prompt_ids"),
        ('{"prompt": "a", "prompt_ids": [1]}', 422, "invalid_request", "one of prompt and prompt_ids"),
        ('{"prompt": "a", "logprobs": 21}', 422, "invalid_request", "logprobs"),
        ('{"prompt_ids": [8192]}', 422, "invalid_request", "8191"),
        ('{"prompt_ids": [1], "sampling": {"max_new_tokens": 1024}}', 422, "invalid_request", "1024"),
        ('{"prompt": "a", "sampling": {"stop": [""]}}', 422, "invalid_request", "stop string"),
    ],
)
def test_an_invalid_request_is_refused_with_its_reason(
    client: testing.TestClient, body: str, status: int, code: str, detail: str
) -> None:
    result = client.simulate_post("/generate", body=body, headers={"X-Request-Id": "r-1"})
    answer = problem(result)
    assert (answer["status"], answer["code"], answer["request_id"]) == (status, code, "r-1")
    assert detail in answer["detail"]


def test_an_unknown_field_is_named(client: testing.TestClient) -> None:
    answer = problem(client.simulate_post("/generate", json={"prompt": "a", "tempo": 3}))
    assert answer["errors"] == [{"field": "tempo", "message": "unknown field"}]


def test_unknown_paths_and_methods(client: testing.TestClient) -> None:
    assert client.simulate_get("/nothing").status == falcon.HTTP_404
    assert client.simulate_get("/generate").status == falcon.HTTP_405


def test_a_slot_without_a_model_is_not_ready() -> None:
    client = testing.TestClient(create_app(make_service(), HANGUPS))
    result = client.simulate_post("/generate", json={"prompt": "a"})
    assert problem(result)["code"] == "not_ready"
    assert result.status == falcon.HTTP_503
    assert int(result.headers["retry-after"]) >= 1
    with open_stream(client, "/state") as states:
        first = next(states)
    assert (first["state"], first["model"], first["max_batch"], first["n_ctx"]) == ("starting", "embedded", 4, 0)
    assert metric(client, "tercet_slot_state", state="starting") == 1


def test_a_full_slot_refuses_until_a_branch_has_ended() -> None:
    with warm_service(max_batch=1, step_delay_s=0.02) as service:
        client = testing.TestClient(create_app(service, HANGUPS))
        with open_stream(client, "/generate", prompt=PROMPT, sampling={"max_new_tokens": 200}) as lines:
            assert next(lines) == {"event": "accepted"}
            result = client.simulate_post("/generate", json={"prompt": PROMPT})
            assert (problem(result)["code"], int(result.headers["retry-after"]) > 0) == ("slot_full", True)
            assert service.state().in_flight == 1
        assert generate(client, prompt=PROMPT, sampling=GREEDY)[-1]["finish_reason"] == "length"
        assert metric(client, "tercet_slot_sequences_total", finish_reason="cancelled") == 1


def test_an_unexpected_exception_is_answered_without_its_text() -> None:
    class BrokenService(SlotService):
        def submit(self, request: GenerateRequest) -> Branch:
            raise RuntimeError("the secret")

    slot = Slot(index=0, device="cpu", model="embedded", socket="", max_batch=1)
    model = Model(name="embedded", directory=str(EMBEDDED), source="embedded", n_ctx=1024, vocab_size=8192)
    service = BrokenService(slot, model, EngineConfig(), Path("unused"), on_fatal=lambda _: None)
    client = testing.TestClient(create_app(service, HANGUPS))
    result = client.simulate_post("/generate", json={"prompt": "a"})
    assert (problem(result)["code"], result.status) == ("internal_error", falcon.HTTP_500)
    assert "secret" not in result.text


# Time, cancellation, state -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow() -> Iterator[SlotService]:
    """Each decode step takes 20 ms or more."""
    with warm_service(step_delay_s=0.02) as service:
        yield service


@pytest.fixture
def slow_client(slow: SlotService) -> testing.TestClient:
    return testing.TestClient(create_app(slow, HANGUPS))


def test_lines_come_while_the_sequence_runs(slow: SlotService, slow_client: testing.TestClient) -> None:
    with open_stream(slow_client, "/generate", prompt=PROMPT, sampling={"max_new_tokens": 30}, stream=True) as lines:
        assert next(lines)["event"] == "accepted"
        assert next(lines)["event"] == "token"
        assert slow.state().in_flight == 1
        assert list(lines)[-1]["event"] == "done"


def test_a_deadline_ends_the_sequence_with_what_it_has(slow_client: testing.TestClient) -> None:
    start = time.monotonic()
    _, done = generate(slow_client, prompt=PROMPT, sampling={"max_new_tokens": 500}, deadline_ms=1000.0)
    assert time.monotonic() - start < 5
    assert done["finish_reason"] == "deadline"
    assert 0 < len(done["token_ids"]) <= 50  # 20 ms each


def test_a_client_that_hangs_up_cancels_its_sequence(slow: SlotService, slow_client: testing.TestClient) -> None:
    ours, theirs = socket.socketpair()
    with ours, open_stream(slow_client, "/generate", ours, prompt=PROMPT, sampling={"max_new_tokens": 500}) as lines:
        assert next(lines)["event"] == "accepted"
        theirs.close()
        assert next(lines)["finish_reason"] == "cancelled"
    assert slow.state().in_flight == 0


def test_the_last_line_leaves_with_the_chunk_that_ends_the_body(slow_client: testing.TestClient) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    holding = HoldingSocket(ours)
    with ours, theirs, open_body(slow_client, "/generate", holding, prompt=PROMPT, sampling=GREEDY) as body:
        for chunk in body:  # as gunicorn sends them
            holding.sendall(chunk)
        assert theirs.recv(1 << 16) == b'{"event":"accepted"}\n'
        holding.sendall(b"0\r\n\r\n")
        last_line, end = theirs.recv(1 << 16).split(b"\n", 1)
    assert json.loads(last_line)["event"] == "done"
    assert end == b"0\r\n\r\n"


def test_the_state_stream_ends_when_the_slot_drains_and_running_sequences_finish() -> None:
    with warm_service(step_delay_s=0.02) as service:
        client = testing.TestClient(create_app(service, HANGUPS))
        seen: list[dict[str, Any]] = []

        def read_states() -> None:
            with open_stream(client, "/state") as states:
                seen.extend(states)

        reader = threading.Thread(target=read_states)
        reader.start()
        wait_until(lambda: bool(seen) and seen[-1]["state"] == "warm")
        with open_stream(client, "/generate", prompt=PROMPT, sampling=GREEDY) as lines:
            assert next(lines)["event"] == "accepted"
            service.drain(grace_s=30)
            refused = client.simulate_post("/generate", json={"prompt": PROMPT})
            assert problem(refused)["code"] == "not_ready"
            assert next(lines)["finish_reason"] == "length"
        reader.join(PATIENCE_S)
        assert [state["state"] for state in seen if state["state"] != "warm"] == ["draining"]
        assert seen[-1]["state"] == "draining"
        assert (seen[0]["age"], seen[0]["device"], seen[0]["dtype"], seen[0]["n_ctx"]) == (7, "cpu", "fp32", 1024)
        assert seen[0]["ms_per_token"] > 0


def test_metrics_count_branches_and_tokens(client: testing.TestClient) -> None:
    def counters() -> list[float]:
        names = ("prompt_tokens", "generated_tokens", "cached_tokens")
        sequences = metric(client, "tercet_slot_sequences_total", finish_reason="length")
        return [sequences, *(metric(client, f"tercet_slot_{name}_total") for name in names)]

    before = counters()
    for _ in range(2):
        generate(client, prompt_ids=list(range(40, 72)), sampling=GREEDY)
    growth = [after - was for after, was in zip(counters(), before, strict=True)]
    assert growth[:3] == [2, 64, 16]
    assert growth[3] >= 31  # the second prompt
    assert metric(client, "tercet_slot_max_batch_branches") == 4
    assert metric(client, "tercet_slot_state", state="warm") == 1
