"""Answers of `POST /autocomplete` and `GET /metrics`, through both real pools."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor, LogitsProcessorList

from gateway.generation.selection import REJECTION_DETAILS
from gateway.generation.trimming import trim
from tests.e2e.harness import Tercet, running, until
from workers.engine.loader import random_weights
from workers.engine.model.gpt2 import SHAPES
from workers.text.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parents[2] / "workers/checkpoints/embedded"
OPENING = "The old man looked at the sea and"
PROSE = (
    "It was a bright morning in the early spring, and the road ran white between the hedges. Nobody had passed "
    "that way since dawn except the postman, who whistled as he went, and an old dog with nothing to do. "
) * 12


def prompts(tokenizer: Tokenizer) -> list[str]:
    """Twenty prompts of 1 to 500 tokens that survive decoding and encoding."""
    ids = tokenizer.encode(PROSE)
    lengths = [1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 200, 255, 400, 500]
    return [tokenizer.decode(ids[start : start + length]) for start, length in enumerate(lengths)]


def test_three_different_continuations(tercet: Tercet) -> None:
    answer = tercet.ask(OPENING, seed=7)
    values = [sentence["value"] for sentence in answer["sentences"]]
    assert len(values) == len(set(values)) == 3
    assert all(value.strip() for value in values)
    assert (answer["model"], answer["partial"], answer["errors"]) == ("embedded", False, [])
    assert (answer["seed"], {sentence["seed"] for sentence in answer["sentences"]}) == (7, {7, 8, 9})
    scores = [sentence["score"] for sentence in answer["sentences"]]
    assert scores == sorted(scores, reverse=True)
    assert all(10 < sentence["tokens"] <= 20 for sentence in answer["sentences"])


def test_a_curl_command_with_default_headers_works(tercet: Tercet) -> None:
    response = httpx.post(
        f"{tercet.url}/autocomplete",
        content=b'{"context": "The old man looked at the sea and"}',
        headers={"Content-Type": "application/x-www-form-urlencoded"},
        trust_env=False,
    )
    assert response.status_code == 200
    assert len(response.json()["sentences"]) == 3


def test_a_request_becomes_three_overlapping_branches_with_three_seeds(tercet: Tercet) -> None:
    answer = tercet.client.post(
        "/autocomplete",
        json={"context": OPENING, "seed": 4100, "length": 40},
        headers={"X-Request-Id": "three-branches"},
    ).json()
    assert answer["id"] == "three-branches"

    def finished() -> list[dict[str, Any]]:
        return [line for line in tercet.events("branch_finished") if line["request_id"] == "three-branches"]

    until(lambda: len(finished()) == 3, 10, "a log line of each branch")  # written after the answer has left
    branches = finished()
    assert sorted(branch["seed"] for branch in branches) == [4100, 4101, 4102]
    assert max(branch["started_at"] for branch in branches) < min(branch["ended_at"] for branch in branches)
    assert all(branch["role"] == "workers" for branch in branches)


def test_greedy_text_equals_that_of_transformers(tercet: Tercet) -> None:
    tokenizer = Tokenizer.from_directory(EMBEDDED, 8192)
    model = GPT2LMHeadModel.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    num_plain = 0
    for prompt in prompts(tokenizer):
        answer = tercet.ask(prompt, n_samples=1, length=40, temperature=0, max_tokens=800)
        [sentence] = answer["sentences"]
        assert sentence["value"] == healed_reference(model, tokenizer, prompt), prompt[:40]
        num_plain += reference(model, tokenizer, prompt).startswith(sentence["value"])
    # Where a prompt ends inside a word, token healing may find a likelier word than plain transformers completes.
    assert num_plain >= 15


@pytest.mark.timeout(1200)  # 20 × 40 tokens of a 124-million-parameter model in fp32, twice
def test_greedy_text_of_a_synthetic_model_equals_that_of_transformers(short_tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(EMBEDDED, 50257)
    model = synthetic_reference()
    with running(short_tmp_path, models="synthetic:small") as tercet:
        for prompt in prompts(tokenizer):
            answer = tercet.ask(prompt, n_samples=1, length=40, temperature=0, max_tokens=800)
            assert answer["model"] == "synthetic:small"
            assert answer["sentences"][0]["value"] == healed_reference(model, tokenizer, prompt), prompt[:40]


def synthetic_reference() -> GPT2LMHeadModel:
    """`synthetic:small` as a transformers model: the same random weights, loaded by name."""
    model = GPT2LMHeadModel(GPT2Config())
    weights = random_weights(SHAPES["small"])
    missing, unexpected = model.transformer.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.endswith("attn.bias") for name in missing)
    model.tie_weights()
    return model.eval()


def reference(model: Any, tokenizer: Tokenizer, prompt: str) -> str:
    """Greedy text as transformers generates it."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=0
        )
    return tokenizer.decode(out[0, ids.shape[1] :].tolist())


class TypedPrefix(LogitsProcessor):  # type: ignore[misc]
    """Constrains greedy text to match what was typed of its first word."""

    def __init__(self, tokenizer: Tokenizer, typed: bytes, num_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._typed = typed
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        generated = b"".join(map(self._tokenizer.token_bytes, input_ids[0, self._num_prompt_tokens :].tolist()))
        left = self._typed[len(generated) :]
        if not left:
            return scores
        choices = self._tokenizer.healing.allowed_tokens(left)
        allowed = [*choices.allowed, *{int(scores[0].argmax())}.intersection(choices.if_likeliest)]
        masked = torch.full_like(scores, float("-inf"))
        masked[0, allowed] = scores[0, allowed]
        return masked  # type: ignore[return-value]


def healed_reference(model: Any, tokenizer: Tokenizer, prompt: str) -> str:
    """Greedy text of transformers with token healing, trimmed to where a sentence may end."""
    head, typed = tokenizer.healing.split(prompt)
    ids = torch.tensor([tokenizer.encode(head) or [tokenizer.eos_id]])
    processors = LogitsProcessorList([TypedPrefix(tokenizer, typed, ids.shape[1])])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40 + len(typed), pad_token_id=0,
            logits_processor=processors,
        )  # fmt: skip
    new = out[0, ids.shape[1] :].tolist()
    sizes = list(accumulate(len(tokenizer.token_bytes(token)) for token in new))
    num_forced = sum(size <= len(typed) for size in sizes)
    kept = new[: num_forced + 40]
    has_ended = tokenizer.eos_id in kept
    if has_ended:
        kept = kept[: kept.index(tokenizer.eos_id)]
    ends = [len(tokenizer.decode(kept[: number + 1])) - len(typed.decode()) for number in range(num_forced, len(kept))]
    text = tokenizer.decode(kept)[len(typed.decode()) :]
    return trim(text, ends, 40, "eos" if has_ended else "length", keeps_partial_word=True)


def test_a_seed_gives_the_same_text_alone_and_in_a_full_batch(tercet: Tercet) -> None:
    def ask(seed: int) -> list[str]:
        return [sentence["value"] for sentence in tercet.ask(OPENING, seed=seed, length=40)["sentences"]]

    alone = [ask(seed) for seed in (11, 12)]
    with ThreadPoolExecutor(10) as pool:
        others = [pool.submit(tercet.ask, PROSE[: 40 * n], length=60) for n in range(1, 9)]
        batched = list(pool.map(ask, (11, 12)))
        for other in others:
            other.result()
    assert batched == alone


def test_at_temperature_zero_branches_start_with_the_most_likely_tokens(tercet: Tercet) -> None:
    sentences = tercet.ask(OPENING, temperature=0, seed=0)["sentences"]
    by_branch = {sentence["seed"]: sentence["value"] for sentence in sentences}
    assert len(set(by_branch.values())) == 3
    assert tercet.ask(OPENING, temperature=0, n_samples=1)["sentences"][0]["value"] == by_branch[0]


def test_min_p_of_one_leaves_only_the_most_likely_token(tercet: Tercet) -> None:
    greedy = tercet.ask(n=1, length=8, temperature=0)["sentences"][0]["value"]
    texts = {tercet.ask(n=1, length=8, min_p=1, seed=seed)["sentences"][0]["value"] for seed in range(5)}
    assert texts == {greedy}
    assert len({tercet.ask(n=1, length=8, min_p=0.01, seed=seed)["sentences"][0]["value"] for seed in range(5)}) > 1


def test_predictions_depend_on_the_text_alone(tercet: Tercet) -> None:
    """Branches on one slot share a search, those on two slots do not."""
    context = "The old man looked at the sea and s"
    first = tercet.ask(context, strategy="predict")
    firsts = [sentence["value"].split()[0] for sentence in first["sentences"]]
    assert len(set(firsts)) == 3
    usefulness = [sentence["usefulness"] for sentence in first["sentences"]]
    assert usefulness == sorted(usefulness, reverse=True)
    with ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(tercet.ask, f"She opened the door {number}, and", n=8) for number in range(4)]
        again = list(pool.map(lambda seed: tercet.ask(context, strategy="predict", seed=seed), range(6)))
        for future in crowd:
            future.result()
    values = [[sentence["value"] for sentence in answer["sentences"]] for answer in (first, *again)]
    assert values == values[:1] * 7


def test_a_streamed_prediction_is_the_whole_one(tercet: Tercet) -> None:
    fields = {"context": "It was raining when w", "strategy": "predict", "explain": 2}
    whole = tercet.client.post("/autocomplete", json=fields).json()
    text = tercet.client.post("/autocomplete", json={**fields, "stream": True}).text
    done = json.loads(text[text.rindex("data: ") + len("data: ") :])
    assert [sentence["value"] for sentence in done["sentences"]] == [
        sentence["value"] for sentence in whole["sentences"]
    ]
    for sentence in whole["sentences"]:
        explained = "".join(token["text"] for token in sentence["explanation"])
        assert explained.lstrip(" w").startswith(sentence["value"][:3])


def test_an_empty_context_starts_a_text(tercet: Tercet) -> None:
    assert len(tercet.ask("", seed=3)["sentences"]) == 3


def test_stop_and_single_line(tercet: Tercet) -> None:
    text = tercet.ask(OPENING, temperature=0, n_samples=1, length=40)["sentences"][0]["value"]
    word = text.split()[4]
    stopped = tercet.ask(OPENING, temperature=0, n_samples=1, length=40, stop=[word])["sentences"][0]
    assert stopped["value"] == text[: text.index(word)].rstrip()
    assert stopped["finish_reason"] == "stop"
    for sentence in tercet.ask('"Indeed," said he.\n\n"', single_line=True, length=60, n=8)["sentences"]:
        assert "\n" not in sentence["value"]


def test_max_time_returns_what_is_ready_marked_partial(tercet: Tercet) -> None:
    tercet.ask()
    response = tercet.client.post("/autocomplete", json={"context": OPENING, "length": 256, "max_time": 0.15})
    answer = response.json()
    assert response.status_code == 200, answer
    assert answer["partial"]
    assert {sentence["finish_reason"] for sentence in answer["sentences"]} == {"deadline"}
    assert answer["time"] < 0.5


@pytest.mark.parametrize(
    ("method", "path", "kwargs", "status", "code"),
    [
        ("POST", "/autocomplete", {"content": b"{"}, 400, "invalid_json"),
        ("POST", "/autocomplete", {"json": {"context": "a", "contxt": 1}}, 422, "invalid_request"),
        ("POST", "/autocomplete", {"json": {"context": "a", "max_tokens": 1010}}, 422, "invalid_request"),
        ("POST", "/autocomplete", {"json": {"context": "a", "top_k": 9000}}, 422, "invalid_request"),
        ("POST", "/autocomplete", {"json": {"context": "a", "max_time": 99}}, 422, "invalid_request"),
        ("POST", "/autocomplete", {"json": {"context": "a", "model_size": "xl"}}, 422, "unknown_model"),
        ("POST", "/autocomplete", {"json": {}, "headers": {"Origin": "https://evil.example"}}, 403, "forbidden_origin"),
        ("POST", "/autocomplete", {"json": {}, "headers": {"Origin": "null"}}, 403, "forbidden_origin"),
        ("POST", "/autocomplete", {"json": {}, "headers": {"Host": "evil.example"}}, 421, "unknown_host"),
        ("POST", "/autocomplete", {"content": b"x" * (1 << 20) + b"x"}, 413, "body_too_large"),
        ("POST", "/autocomplete", {"content": iter([b"{}"])}, 411, "length_required"),
        ("GET", "/autocomplete", {}, 405, "method_not_allowed"),
        ("GET", "/nothing", {}, 404, "not_found"),
    ],
)
def test_refusals_are_problem_json_with_a_detail(
    tercet: Tercet, method: str, path: str, kwargs: dict[str, Any], status: int, code: str
) -> None:
    response = httpx.request(method, tercet.url + path, trust_env=False, **kwargs)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["request_id"] == response.headers["x-request-id"]
    assert len(problem["detail"]) > 20


def test_refusals_list_served_models_methods_and_an_example(tercet: Tercet) -> None:
    unknown = tercet.client.post("/autocomplete", json={"context": "a", "model_size": "xl"}).json()
    assert "served: embedded" in unknown["detail"]
    wrong = tercet.client.get("/autocomplete")
    assert wrong.headers["allow"].startswith("POST")
    assert 'curl -d \'{"context"' in wrong.json()["detail"]


def test_the_own_page_and_listed_origins_are_allowed(short_tmp_path: Path) -> None:
    with running(short_tmp_path, origins="https://notes.example") as tercet:
        own = tercet.client.post("/autocomplete", json={"context": "a"}, headers={"Origin": tercet.url})
        assert own.status_code == 200
        listed = {"Origin": "https://notes.example"}
        response = tercet.client.post("/autocomplete", json={"context": "a"}, headers=listed)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://notes.example"
        preflight = tercet.client.options("/autocomplete", headers={**listed, "Access-Control-Request-Method": "POST"})
        assert preflight.status_code == 204
        assert "POST" in preflight.headers["access-control-allow-methods"]


def test_the_gateway_exposes_every_slots_metrics(tercet: Tercet) -> None:
    tercet.ask()
    text = tercet.client.get("/metrics").text
    for slot in (0, 1):
        assert f'tercet_slot_state{{slot="{slot}",state="warm"}} 1.0' in text
        assert f'tercet_slot_token_seconds{{slot="{slot}"}}' in text
    assert 'tercet_requests_total{route="/autocomplete",status="200"}' in text


def test_a_worker_exposes_its_own_slots_metrics(tercet: Tercet) -> None:
    transport = httpx.HTTPTransport(uds=str(tercet.run_dir / "slot-1.sock"))
    with httpx.Client(transport=transport, base_url="http://slot") as worker:
        text = worker.get("/metrics").text
    assert 'tercet_slot_state{slot="1",state="warm"} 1.0' in text
    assert 'slot="0"' not in text


def test_a_worker_reports_its_memory_and_its_branches(tercet: Tercet) -> None:
    for row in tercet.slots():
        rss = psutil.Process(row["pid"]).memory_info().rss  # more than the proportional set size by what is shared
        assert 0.3 * rss < row["memory_bytes"] < 1.1 * rss
    tercet.ask(length=60)
    # For about a second after the request.
    assert sum(row["peak_in_flight"] for row in tercet.slots()) >= 3
    until(lambda: not any(row["peak_in_flight"] for row in tercet.slots()), 10, "slots at rest")


def test_no_prompt_is_logged(short_tmp_path: Path) -> None:
    canary = "zwieback-canary-51"
    with running(short_tmp_path, log="debug") as tercet:
        tercet.ask(f"The {canary} of")
        tercet.client.post("/autocomplete", json={"context": canary, "n": 99, "stop": [canary]})
        tercet.client.post("/autocomplete", content=f'{{"context": "{canary}'.encode())
        metrics = tercet.client.get("/metrics").text
    assert canary not in tercet.log()
    assert canary not in metrics


def test_parameters_at_their_bounds_fail_no_branch(tercet: Tercet) -> None:
    """The smallest and the largest numbers that the schema accepts, and texts of odd characters. Completions may be
    rejected: a penalty of 0.01 repeats the prompt's words."""
    tiny = 5e-324
    for fields in (
        {"temperature": tiny}, {"temperature": 1e-320, "top_p": tiny}, {"temperature": -0.0},
        {"temperature": 5, "top_k": 0},
        {"top_p": tiny}, {"top_p": 1 - 2**-53}, {"top_k": 1, "top_p": tiny, "min_p": 1}, {"min_p": tiny}, {"min_p": 1},
        {"repetition_penalty": 0.01}, {"repetition_penalty": 100}, {"repetition_penalty": 100, "temperature": tiny},
        {"repetition_penalty": 0.01, "temperature": 5, "top_k": 0, "top_p": 0}, {"seed": 2**63 - 1, "n": 8},
        {"max_tokens": 1, "length": 256}, {"stop": ["x" * 256] * 8}, {"stop": ["\x00"]}, {"session": "\x00"},
        {"context": "\x00" * 300}, {"context": "\ufeff\u202e\U0010ffff"}, {"context": ""}, {"explain": 10, "n": 8},
    ):  # fmt: skip
        body = {"context": "The old man looked at", "length": 3, "seed": 1, **fields}
        response = tercet.client.post("/autocomplete", json=body)
        assert response.status_code == 200, (fields, response.text)
        assert {error["code"] for error in response.json()["errors"]} <= REJECTION_DETAILS.keys(), fields
