"""What every endpoint of the internal protocol must do, whatever is behind it: one worker, or a cluster's proxy.

A contract is subclassed where an endpoint is made (its fixture `endpoint`). All workers behind it have the
embedded checkpoint in fp32, and each decode step takes `STEP_MS` or more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from shared.errors import PROBLEM_JSON
from tests.e2e.harness import until

PROMPT = "The old man looked at the sea and"
GREEDY = {"max_new_tokens": 8, "temperature": 0.0}
STEP_MS = 20
# 16 s and more: the end of the text is not drawn.
LONG = {"max_new_tokens": 800, "logit_bias": [[0, -100.0]]}
PATIENCE_S = 30.0
INVALID = [
    ("{", 400, "invalid_json", "JSON"),
    ('{"prompt": "a", "tempo": 3}', 422, "invalid_request", "tempo"),
    ("{}", 422, "invalid_request", "one of prompt and prompt_ids"),
    ('{"prompt_ids": [1], "sampling": {"max_new_tokens": 1024}}', 422, "prompt_too_long", "1024"),
    ('{"prompt": "a", "sampling": {"stop": [""]}}', 422, "invalid_request", "stop string"),
    ('{"prompt": "a", "prompt_ids": [1]}', 422, "invalid_request", "one of prompt and prompt_ids"),
    ('{"prompt": "a", "logprobs": 21}', 422, "invalid_request", "logprobs"),
    ('{"prompt": "a", "sampling": {"frequency_penalty": 2.5}}', 422, "invalid_request", "sampling"),
    ('{"prompt": "a", "sampling": {"logit_bias": [[8192, 1.0]]}}', 422, "invalid_request", "logit_bias"),
]


@dataclass
class Endpoint:
    """Where the protocol is spoken: a URL, the pool's keys in the order of their file, and a client."""

    url: str
    keys: tuple[str, ...] = ("",)
    client: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, timeout=PATIENCE_S))

    def headers(self, **headers: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[0]}", **headers}

    def post(self, path: str, content: str | None = None, /, session: str = "", **fields: Any) -> httpx.Response:
        body = json.dumps(fields | ({"session": session} if session else {})) if content is None else content
        headers = self.headers(**{"X-Session-Id": session, "X-Request-Id": "r-1"})
        return self.client.post(self.url + path, content=body, headers=headers)

    def generate(self, session: str = "", **fields: Any) -> list[dict[str, Any]]:
        """The lines of a branch that is not refused."""
        response = self.post("/generate", session=session, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in response.text.splitlines()]

    @contextmanager
    def open(self, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The lines as they come; the connection is closed at the end of the block. GET /state without fields."""
        method, path, content = ("POST", "/generate", json.dumps(fields)) if fields else ("GET", "/state", "")
        with self.client.stream(method, self.url + path, content=content, headers=self.headers()) as response:
            assert response.status_code == 200, response.read()
            yield (json.loads(line) for line in response.iter_lines())

    def state(self) -> dict[str, Any]:
        with self.open() as states:
            return next(states)

    def wait_for_in_flight(self, number: int) -> float:
        """Wait until this number of sequences is in the engines; returns seconds."""
        start = time.monotonic()
        with self.open() as states:
            for state in states:
                if state["in_flight"] == number:
                    return time.monotonic() - start
                assert time.monotonic() - start < PATIENCE_S, state
        raise AssertionError("the state stream ended")

    def fill(self, stack: ExitStack, number: int) -> None:
        """Start branches that run until the stack is closed."""
        streams = [stack.enter_context(self.open(prompt=PROMPT, sampling=LONG, stream=True)) for _ in range(number)]
        stack.callback(streams.clear)  # a generator that is not referenced closes its connection
        for lines in streams:
            assert next(lines) == {"event": "accepted"}


def problem(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == PROBLEM_JSON, response.text
    body: dict[str, Any] = response.json()
    assert body["status"] == response.status_code
    return body


class SlotContract:
    """Of a slot's app too, which any local process may use. A subclass has the fixture `endpoint`."""

    def test_a_stream_is_the_answer_token_by_token(self, endpoint: Endpoint) -> None:
        first, whole = endpoint.generate(prompt=PROMPT, sampling=GREEDY)
        assert (whole["event"], whole["finish_reason"]) == ("done", "length")
        accepted, *tokens, done = endpoint.generate(prompt=PROMPT, sampling=GREEDY, stream=True, session="other")
        assert first == accepted == {"event": "accepted"}
        assert [token["token_id"] for token in tokens] == done["token_ids"] == whole["token_ids"]
        assert "".join(token["text"] for token in tokens) == done["text"] == whole["text"]

    def test_lines_come_while_the_sequence_runs(self, endpoint: Endpoint) -> None:
        start = time.monotonic()
        with endpoint.open(prompt=PROMPT, sampling={"max_new_tokens": 40}, stream=True) as lines:
            assert next(lines)["event"] == "accepted"
            assert next(lines)["event"] == "token"
            first_s = time.monotonic() - start
            assert list(lines)[-1]["event"] == "done"
        assert time.monotonic() - start - first_s > 20 * STEP_MS / 1e3  # of 38 further steps

    def test_a_healed_prompt_streams_only_new_text(self, endpoint: Endpoint) -> None:
        prompt = "The old man looked at the se"
        _, *tokens, done = endpoint.generate(prompt=prompt, heal=True, sampling=GREEDY, stream=True)
        assert done["num_typed_tokens"] + len(tokens) <= len(done["token_ids"]) + 1
        assert "".join(token["text"] for token in tokens) == done["text"]

    def test_a_draw_depends_on_its_seed(self, endpoint: Endpoint) -> None:
        sampling = {"max_new_tokens": 8, "temperature": 1.5}
        texts = [endpoint.generate(prompt=PROMPT, sampling=sampling, seed=seed)[-1]["text"] for seed in (1, 2, 1, 2)]
        assert texts[:2] == texts[2:]
        assert texts[0] != texts[1]

    @pytest.mark.parametrize(("body", "status", "code", "detail"), INVALID)
    def test_an_invalid_request_is_refused_with_its_reason(
        self, endpoint: Endpoint, body: str, status: int, code: str, detail: str
    ) -> None:
        answer = problem(endpoint.post("/generate", body))
        assert (answer["status"], answer["code"], answer["request_id"]) == (status, code, "r-1")
        assert detail in answer["detail"]

    def test_unknown_paths_and_methods(self, endpoint: Endpoint) -> None:
        assert endpoint.post("/nothing", "{}").status_code == 404
        assert endpoint.client.get(f"{endpoint.url}/generate", headers=endpoint.headers()).status_code == 405

    def test_a_text_is_tokenized(self, endpoint: Endpoint) -> None:
        tokens = endpoint.post("/tokenize", text="hello there").json()
        assert "".join(tokens["texts"]) == "hello there"
        assert tokens["ends"][-1] == len("hello there")
        assert (tokens["n_ctx"], tokens["eos_id"]) == (1024, 0)
        assert problem(endpoint.post("/tokenize", txt="a"))["code"] == "invalid_request"

    def test_the_state_describes_the_pool(self, endpoint: Endpoint) -> None:
        with endpoint.open() as first:
            state = next(first)
            assert (state["state"], state["model"], state["dtype"]) == ("warm", "embedded", "fp32")
            assert (state["n_ctx"], state["vocab_size"]) == (1024, 8192)
            assert state["max_batch"] >= 1
            assert state["num_replicas"] >= 1
            with endpoint.open() as second:
                until(lambda: next(second)["num_gateways"] == 2, PATIENCE_S, "two gateways are counted")
            start = time.monotonic()
            for _ in range(3):
                next(first)
            assert time.monotonic() - start < 3

    def test_a_full_pool_refuses_until_a_branch_has_ended(self, endpoint: Endpoint) -> None:
        max_batch = endpoint.state()["max_batch"]
        with ExitStack() as stack:
            endpoint.fill(stack, max_batch)
            response = endpoint.post("/generate", prompt=PROMPT)
            answer = problem(response)
            assert (answer["status"], answer["code"]) == (503, "slot_full")
            assert int(response.headers["retry-after"]) > 0
            endpoint.wait_for_in_flight(max_batch)
        endpoint.wait_for_in_flight(0)
        assert endpoint.generate(prompt=PROMPT, sampling=GREEDY)[-1]["finish_reason"] == "length"

    def test_a_deadline_ends_the_sequence_with_what_it_has(self, endpoint: Endpoint) -> None:
        _, done = endpoint.generate(prompt=PROMPT, sampling=LONG, deadline_ms=1000.0)
        assert done["finish_reason"] == "deadline"
        assert 0 < len(done["token_ids"]) <= 1000 / STEP_MS

    def test_a_client_that_hangs_up_cancels_its_sequence(self, endpoint: Endpoint) -> None:
        endpoint.wait_for_in_flight(0)
        with endpoint.open(prompt=PROMPT, sampling=LONG, stream=True) as lines:
            assert next(lines)["event"] == "accepted"
            endpoint.wait_for_in_flight(1)
        assert endpoint.wait_for_in_flight(0) < 5  # of 16 s

    def test_a_document_is_remembered(self, endpoint: Endpoint) -> None:
        prompt = "It was a long walk to the lighthouse, and the rain had not stopped since the morning. "
        for number in range(6):
            first, second = (
                endpoint.generate(prompt=prompt, sampling={"max_new_tokens": 2}, session=f"document {number}")[-1]
                for _ in range(2)
            )
            assert first["cached_tokens"] == 0
            assert second["cached_tokens"] > 10


class ProtocolContract(SlotContract):
    """Of endpoints on TCP, which require a key."""

    def test_a_request_needs_one_of_the_keys(self, endpoint: Endpoint) -> None:
        for headers in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": endpoint.keys[0]}):
            response = endpoint.client.post(f"{endpoint.url}/generate", content="{}", headers=headers)
            answer = problem(response)
            assert (answer["status"], answer["code"]) == (401, "unauthorized")
            assert endpoint.keys[0] not in response.text
        for key in endpoint.keys:
            headers = {"Authorization": f"Bearer {key}"}
            response = endpoint.client.post(f"{endpoint.url}/tokenize", content='{"text": "a"}', headers=headers)
            assert response.status_code == 200

    def test_probes_need_no_key(self, endpoint: Endpoint) -> None:
        for path in ("/health/live", "/health/ready"):
            assert endpoint.client.get(endpoint.url + path).status_code == 200
