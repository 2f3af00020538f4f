"""The worker's HTTP face over a real service: embedded checkpoint, fp32, in this process, no server and no socket.

Texts and log-probabilities are compared with those of transformers.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import falcon
import msgspec
import pytest
import torch
from falcon import testing
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer, GPT2LMHeadModel

from gateway.pool.client import MAX_LINE_BYTES
from shared.errors import PROBLEM_JSON
from shared.hangups import HangupWatcher
from shared.plan import Model, Slot
from shared.protocol import GenerateRequest, TokenizeResponse
from tests.workers.helpers import EMBEDDED, PATIENCE_S, wait_until
from workers.app import create_app
from workers.engine.engine import EngineConfig
from workers.gunicorn_worker import SWITCH_INTERVAL_S, HoldingSocket
from workers.service import Branch, SlotService
from workers.text.tokenizer import Tokenizer

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


@pytest.mark.parametrize("is_cached", [False, True])
def test_echoed_tops_are_those_of_transformers(client: testing.TestClient, reference: Any, is_cached: bool) -> None:
    prompt = f"{PROMPT} the {'ship' if is_cached else 'boat'}"
    if is_cached:
        generate(client, prompt=prompt, sampling=GREEDY)
    _, done = generate(client, prompt=prompt, sampling=GREEDY, echo=True, logprobs=3)
    with torch.inference_mode():
        expected = reference(torch.tensor([done["prompt_ids"]])).logits[0].log_softmax(-1)
    assert done["prompt_tops"][0] is None
    assert len(done["prompt_tops"]) == len(done["prompt_ids"]) == done["num_prompt_tokens"]
    for position, top in enumerate(done["prompt_tops"][1:]):
        best = expected[position].topk(3)
        assert [token_id for token_id, _, _ in top] == best.indices.tolist()
        assert [logprob for _, _, logprob in top] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_echo_describes_the_prompt_token_by_token(client: testing.TestClient, reference_tokenizer: Any) -> None:
    prompt = "Naïve 🦉s, they said: don't"
    _, done = generate(client, prompt=prompt, sampling=GREEDY, echo=True)
    assert done["prompt_ids"] == reference_tokenizer(prompt).input_ids
    assert done["prompt_text"] == prompt
    ends = done["prompt_ends"]
    assert len(ends) == len(done["prompt_token_texts"]) == len(done["prompt_ids"])
    for start, end, text in zip([0, *ends], ends, done["prompt_token_texts"], strict=False):
        assert "\ufffd" in text or text == prompt[start:end]
    assert ends[-1] == len(prompt)
    assert (done["prompt_logprobs"], done["prompt_tops"], done["tops"]) == (None, None, None)


def test_echo_of_a_healed_prompt_ends_where_the_output_begins(client: testing.TestClient) -> None:
    _, done = generate(client, prompt=PROMPT + " the sh", heal=True, sampling=GREEDY, echo=True, logprobs=0)
    assert done["prompt_text"] == PROMPT + " the"
    assert len(done["prompt_logprobs"]) == len(done["prompt_ids"])


def test_echo_of_an_empty_prompt_is_empty(client: testing.TestClient) -> None:
    _, done = generate(client, prompt="", sampling=GREEDY, echo=True, logprobs=2)
    fields = ("prompt_ids", "prompt_token_texts", "prompt_ends", "prompt_logprobs", "prompt_tops")
    assert [done[field] for field in fields] == [[]] * 5
    assert done["prompt_text"] == ""
    assert len(done["tops"]) == 8


def test_no_top_logprobs_are_empty_lists(client: testing.TestClient) -> None:
    _, done = generate(client, prompt=PROMPT, sampling=GREEDY, echo=True, logprobs=0)
    assert done["tops"] == [[]] * 8
    assert done["prompt_tops"] == [None, *[[]] * (done["num_prompt_tokens"] - 1)]
    assert len(done["prompt_logprobs"]) == done["num_prompt_tokens"]


def test_echo_of_a_branch_that_ends_before_its_prefill_has_no_logprobs(client: testing.TestClient) -> None:
    _, done = generate(client, prompt=PROMPT, sampling=GREEDY, echo=True, logprobs=2, deadline_ms=1e-6)
    assert done["finish_reason"] == "deadline"
    assert done["prompt_text"] == PROMPT
    assert (done["prompt_logprobs"], done["prompt_tops"], done["tops"]) == (None, None, [])


@pytest.mark.parametrize("number", [0, 3])
def test_streamed_tokens_carry_their_text_and_tops(client: testing.TestClient, number: int) -> None:
    _, *tokens, done = generate(client, prompt=PROMPT, sampling=GREEDY, stream=True, logprobs=number)
    assert [token["token_text"] for token in tokens] == done["token_texts"]
    assert [token["tops"] for token in tokens] == done["tops"]
    assert {len(token["tops"]) for token in tokens} == {number}
    _, *plain, _ = generate(client, prompt=PROMPT, sampling=GREEDY, stream=True)
    assert all(token.keys() == {"event", "text", "token_id", "logprob"} for token in plain)


def test_penalties_and_biases_change_the_text(client: testing.TestClient) -> None:
    _, free = generate(client, prompt=PROMPT, sampling=GREEDY)
    banned = free["token_ids"][0]
    _, biased = generate(client, prompt=PROMPT, sampling={**GREEDY, "logit_bias": [[banned, -100.0]]})
    assert banned not in biased["token_ids"]
    forced = {**GREEDY, "logit_bias": [[banned, 100.0]], "max_new_tokens": 60}
    assert set(generate(client, prompt=PROMPT, sampling=forced)[-1]["token_ids"]) == {banned}
    # Each occurrence takes 2 from its logit: after enough of them, another token is likelier in spite of the bias.
    penalized = {**forced, "frequency_penalty": 2.0}
    assert len(set(generate(client, prompt=PROMPT, sampling=penalized)[-1]["token_ids"])) > 1


def test_the_longest_line_fits_the_gateways_bound(client: testing.TestClient) -> None:
    result = client.simulate_post(
        "/generate", json={"prompt_ids": list(range(1000)), "sampling": GREEDY, "echo": True, "logprobs": 20}
    )
    assert 500_000 < max(map(len, result.content.splitlines())) < MAX_LINE_BYTES


# Tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", PROMPT, "Naïve 🦉s\n\n don't  stop", "a<|endoftext|>b", "the sea\n" * 3000])
def test_tokens_of_a_text_are_those_of_transformers(
    client: testing.TestClient, reference_tokenizer: Any, text: str
) -> None:
    result = client.simulate_post("/tokenize", json={"text": text})
    assert result.headers["content-type"] == "application/json"
    tokens = msgspec.json.decode(result.content, type=TokenizeResponse)
    assert tokens.ids == reference_tokenizer(text).input_ids
    assert (tokens.n_ctx, tokens.eos_id) == (1024, 0)
    assert len(tokens.ends) == len(tokens.texts) == len(tokens.ids)
    for start, end, token_text in zip([0, *tokens.ends], tokens.ends, tokens.texts, strict=False):
        assert "\ufffd" in token_text or text[start:end] in (token_text, "<|endoftext|>")
    assert tokens.ends[-1:] == ([len(text)] if text else [])


@pytest.mark.parametrize(("body", "detail"), [("{}", "text"), ('{"text": 3}', "text"), ('{"text": "", "x": 1}', "x")])
def test_an_invalid_text_is_refused(client: testing.TestClient, body: str, detail: str) -> None:
    answer = problem(client.simulate_post("/tokenize", body=body))
    assert (answer["status"], answer["code"]) == (422, "invalid_request")
    assert detail in answer["detail"]


def test_a_very_long_text_does_not_stall_running_sequences(
    client: testing.TestClient,
) -> None:
    """Encoding it in one call would hold the interpreter lock for half a second. The best of three, as load adds."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    text = "The old man looked at the sea, and said nothing.\n" * 21_000  # a MiB
    longest_s = []
    try:
        for _ in range(3):
            with ThreadPoolExecutor(1) as pool:
                sampling = {"max_new_tokens": 900, "temperature": 0.0}
                with open_stream(client, "/generate", prompt=PROMPT, sampling=sampling, stream=True) as lines:
                    next(lines)
                    tokenizing = pool.submit(client.simulate_post, "/tokenize", json={"text": text})
                    times = [time.monotonic()]
                    for _line in lines:
                        times.append(time.monotonic())
                        if tokenizing.done():
                            break
                assert len(tokenizing.result().json["ids"]) > 200_000
            longest_s.append(max(after - before for before, after in pairwise(times)))
    finally:
        sys.setswitchinterval(interval_s)
    assert min(longest_s) < 0.2, longest_s


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
        ('{"prompt_ids": [1], "sampling": {"max_new_tokens": 1024}}', 422, "prompt_too_long", "1024"),
        ('{"prompt": "a", "sampling": {"frequency_penalty": 2.5}}', 422, "invalid_request", "sampling"),
        ('{"prompt": "a", "sampling": {"logit_bias": [[8192, 1.0]]}}', 422, "invalid_request", "logit_bias"),
        ('{"prompt": "a", "sampling": {"logit_bias": [[3, 101.0]]}}', 422, "invalid_request", "logit_bias"),
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


def test_a_prompt_that_is_too_long_is_refused_with_its_numbers(client: testing.TestClient) -> None:
    for fields in ({"prompt_ids": [5] * 1020}, {"prompt": " the" * 1020}):
        answer = problem(client.simulate_post("/generate", json={**fields, "sampling": GREEDY}))
        assert (answer["status"], answer["code"]) == (422, "prompt_too_long")
        assert re.search(r"\b1020\b.*\bmax_new_tokens 8\b.*\b1024\b", answer["detail"])
    assert generate(client, prompt_ids=[5] * 1016, sampling=GREEDY)[-1]["num_prompt_tokens"] == 1016


def test_a_text_that_cannot_fit_is_refused_without_encoding_it(
    client: testing.TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, lengths = Tokenizer.encode_with_starts, []

    def record(self: Tokenizer, text: str) -> tuple[list[int], list[int]]:
        lengths.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode_with_starts", record)
    answer = problem(client.simulate_post("/generate", json={"prompt": "the " * (1 << 18), "sampling": GREEDY}))
    assert answer["code"] == "prompt_too_long"
    assert "1024" in answer["detail"]
    assert max(lengths, default=0) < 100


def test_an_unknown_field_is_named(client: testing.TestClient) -> None:
    answer = problem(client.simulate_post("/generate", json={"prompt": "a", "tempo": 3}))
    assert answer["errors"] == [{"field": "tempo", "message": "unknown field"}]


def test_unknown_paths_and_methods(client: testing.TestClient) -> None:
    assert client.simulate_get("/nothing").status == falcon.HTTP_404
    assert client.simulate_get("/generate").status == falcon.HTTP_405


def test_a_slot_without_a_model_is_not_ready() -> None:
    client = testing.TestClient(create_app(make_service(), HANGUPS))
    assert problem(client.simulate_post("/tokenize", json={"text": "a"}))["code"] == "not_ready"
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
