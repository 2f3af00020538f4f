"""Tokens over a slot's HTTP face: log-probabilities, echoed prompts, penalties, biases, and `POST /tokenize`."""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from shared.protocol import TokenizeResponse
from shared.wire import MAX_LINE_BYTES
from tests.workers.contract import GREEDY, PROMPT, Endpoint, problem
from tests.workers.helpers import EMBEDDED
from workers.gunicorn_worker import SWITCH_INTERVAL_S
from workers.text.detokenizer import CharacterIndex
from workers.text.tokenizer import Tokenizer


@pytest.mark.parametrize("prompt", ["Naïve 🦉s, they said: don't", "the end<|endoftext|>and a <|endof"])
def test_echo_describes_the_prompt_token_by_token(client: Endpoint, reference_tokenizer: Any, prompt: str) -> None:
    _, done = client.generate(prompt=prompt, sampling=GREEDY, echo=True)
    assert done["prompt_ids"] == reference_tokenizer(prompt).input_ids
    assert done["prompt_text"] == prompt
    ends = done["prompt_ends"]
    assert len(ends) == len(done["prompt_token_texts"]) == len(done["prompt_ids"])
    for start, end, text in zip([0, *ends], ends, done["prompt_token_texts"], strict=False):
        assert "\ufffd" in text or text == prompt[start:end]
    assert ends[-1] == len(prompt)
    assert (done["prompt_logprobs"], done["prompt_tops"], done["tops"]) == (None, None, None)


def test_echo_of_a_healed_prompt_ends_where_the_output_begins(client: Endpoint) -> None:
    _, done = client.generate(prompt=PROMPT + " the sh", heal=True, sampling=GREEDY, echo=True, logprobs=0)
    assert done["prompt_text"] == PROMPT + " the"
    assert len(done["prompt_logprobs"]) == len(done["prompt_ids"])


@pytest.mark.parametrize("number", [0, 3, 20])
@pytest.mark.parametrize("prompt", ["“Où es-tu ?” dit-", "Größe 🦉 Привет, καλημέρα", "a<|endoftext|>é"])
def test_scores_name_parts_of_characters_and_say_where_they_begin(
    client: Endpoint, reference_tokenizer: Any, prompt: str, number: int
) -> None:
    """Bytes of "é", "ü" and "“" are all that can be generated."""
    tokenizer = Tokenizer.from_directory(EMBEDDED, 8192)
    ids = [id_ for id_ in range(8192) if tokenizer.token_bytes(id_) in {b"\xc3", b"\xa9", b"\xbc", b"\xe2\x80"}]
    sampling = {**GREEDY, "temperature": 1.0, "logit_bias": [[id_, 100.0] for id_ in ids]}
    fields: dict[str, Any] = {"prompt": prompt, "sampling": sampling, "seed": 7, "logprobs": number}
    done = client.generate(**fields, echo=True)[-1]
    assert done["prompt_ids"] == reference_tokenizer(prompt).input_ids
    parts = [b"<|endoftext|>" if id_ == 0 else tokenizer.token_bytes(id_) for id_ in done["prompt_ids"]]
    assert [0, *done["prompt_ends"]] == [*map(CharacterIndex().feed, parts), len(prompt)]
    assert done["begins"] == [*map(CharacterIndex().feed, map(tokenizer.token_bytes, done["token_ids"]))]
    assert done["prompt_tops"][0] is None
    assert {len(top) for top in [*done["prompt_tops"][1:], *done["tops"]]} == {number}
    tops = [top for tops in [*done["prompt_tops"], *done["tops"]] for top in tops or []]
    reported = {*done["prompt_ids"], *done["token_ids"], *(id_ for id_, _, _ in tops)}
    assert {int(id_): name for id_, name in done["names"].items()} == tokenizer.names_of(reported)
    assert set(ids) >= set(done["token_ids"])
    assert all(done["names"][str(id_)].startswith("bytes:\\x") for id_ in done["token_ids"])
    _, *tokens, last = client.generate(**fields, stream=True)
    assert [token["begin"] for token in tokens] == last["begins"] == done["begins"]
    assert [token["token_text"] for token in tokens] == last["token_texts"]
    assert [token["tops"] for token in tokens] == last["tops"]
    for token in tokens:
        reported = {token["token_id"], *(id_ for id_, _, _ in token["tops"])}
        assert {int(id_): name for id_, name in token["names"].items()} == tokenizer.names_of(reported)


def test_a_token_begins_in_its_place_while_a_stop_string_may_have_begun(client: Endpoint) -> None:
    _, free = client.generate(prompt=PROMPT, sampling=GREEDY, logprobs=0)
    assert free["names"] is None
    _, *plain, _ = client.generate(prompt=PROMPT, sampling=GREEDY, stream=True)
    assert all(token.keys() == {"event", "text", "token_id", "logprob"} for token in plain)
    stop = [free["text"][:4] + "\x00", free["text"][6:9]]  # the first of them is never complete
    _, *tokens, done = client.generate(prompt=PROMPT, sampling={**GREEDY, "stop": stop}, logprobs=0, stream=True)
    assert done["text"] == free["text"][:6]
    assert [token["begin"] for token in tokens] == done["begins"] == free["begins"][: len(done["begins"])]


@pytest.mark.parametrize("heal", [False, True])
@pytest.mark.parametrize("max_prompt_tokens", [None, 100])
def test_what_spells_a_special_token_is_text_where_the_request_says_so(
    client: Endpoint, heal: bool, max_prompt_tokens: int | None
) -> None:
    text = "<|endoftext|>" * 3 + " a <|endof"
    for special_as_text in (False, True):
        fields: dict[str, Any] = {
            "heal": heal,
            "special_as_text": special_as_text,
            "max_prompt_tokens": max_prompt_tokens,
        }
        _, done = client.generate(prompt=text, sampling=GREEDY, echo=True, **fields)
        assert text.startswith(done["prompt_text"])
        assert done["prompt_ids"].count(0) == (0 if special_as_text else 3)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """The texts that the slot has encoded, and their ids."""
    encode, found = Tokenizer.encode_with_starts, []

    def record(self: Tokenizer, text: str, *, special_as_text: bool = False) -> tuple[list[int], list[int]]:
        ids, starts = encode(self, text, special_as_text=special_as_text)
        found.append((text, ids))
        return ids, starts

    monkeypatch.setattr(Tokenizer, "encode_with_starts", record)
    return found


@pytest.mark.parametrize("suffix", ["<|endoftext|> said", " and <|endoftext|>"])
def test_what_spells_a_special_token_after_a_gap_is_text_where_the_request_says_so(
    client: Endpoint, encoded: list[tuple[str, list[int]]], suffix: str
) -> None:
    for special_as_text in (True, False):
        encoded.clear()
        client.generate(prompt=PROMPT, sampling=GREEDY, suffix=suffix, special_as_text=special_as_text)
        assert any(0 in ids for _, ids in encoded) != special_as_text


def test_a_stop_string_that_spells_a_special_token_is_text(client: Endpoint) -> None:
    """The end of a text is not its text, so it completes no stop string."""
    for bias, reason in ((100.0, "eos"), (-100.0, "length")):
        sampling = {**GREEDY, "stop": ["<|endoftext|>"], "logit_bias": [[0, bias]]}
        done = client.generate(prompt=PROMPT, sampling=sampling)[-1]
        assert done["finish_reason"] == reason
        assert "<|" not in done["text"]


def test_echo_of_an_empty_prompt_is_empty(client: Endpoint) -> None:
    _, done = client.generate(prompt="", sampling=GREEDY, echo=True, logprobs=2)
    fields = ("prompt_ids", "prompt_token_texts", "prompt_ends", "prompt_logprobs", "prompt_tops")
    assert [done[field] for field in fields] == [[]] * 5
    assert done["prompt_text"] == ""
    assert len(done["tops"]) == 8


def test_echo_of_a_branch_that_ends_before_its_prefill_has_no_logprobs(client: Endpoint) -> None:
    _, done = client.generate(prompt=PROMPT, sampling=GREEDY, echo=True, logprobs=2, deadline_ms=1e-6)
    assert done["finish_reason"] == "deadline"
    assert done["prompt_text"] == PROMPT
    assert (done["prompt_logprobs"], done["prompt_tops"], done["tops"]) == (None, None, [])


def test_penalties_and_biases_change_the_text(client: Endpoint) -> None:
    _, free = client.generate(prompt=PROMPT, sampling=GREEDY)
    banned = free["token_ids"][0]
    _, biased = client.generate(prompt=PROMPT, sampling={**GREEDY, "logit_bias": [[banned, -100.0]]})
    assert banned not in biased["token_ids"]
    forced = {**GREEDY, "logit_bias": [[banned, 100.0]], "max_new_tokens": 60}
    assert set(client.generate(prompt=PROMPT, sampling=forced)[-1]["token_ids"]) == {banned}
    # Each occurrence takes 2 from its logit: after enough of them, another token is likelier in spite of the bias.
    penalized = {**forced, "frequency_penalty": 2.0}
    assert len(set(client.generate(prompt=PROMPT, sampling=penalized)[-1]["token_ids"])) > 1


def test_the_longest_line_fits_the_gateways_bound(client: Endpoint) -> None:
    result = client.post("/generate", prompt_ids=list(range(1000)), sampling=GREEDY, echo=True, logprobs=20)
    assert 500_000 < max(map(len, result.content.splitlines())) < MAX_LINE_BYTES


# Tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", PROMPT, "Naïve 🦉s\n\n don't  stop", "a<|endoftext|>b", "the sea\n" * 3000])
def test_tokens_of_a_text_are_those_of_transformers(client: Endpoint, reference_tokenizer: Any, text: str) -> None:
    result = client.post("/tokenize", text=text)
    assert result.headers["content-type"] == "application/json"
    tokens = msgspec.json.decode(result.content, type=TokenizeResponse)
    assert tokens.ids == reference_tokenizer(text).input_ids
    assert (tokens.n_ctx, tokens.eos_id) == (1024, 0)
    assert len(tokens.ends) == len(tokens.texts) == len(tokens.ids)
    for start, end, token_text in zip([0, *tokens.ends], tokens.ends, tokens.texts, strict=False):
        assert "\ufffd" in token_text or text[start:end] == token_text
    assert tokens.ends[-1:] == ([len(text)] if text else [])


def test_a_very_long_text_does_not_stall_running_sequences(client: Endpoint) -> None:
    """Encoding it in one call would hold the interpreter lock for most of the time that the request takes.

    The best of three, and as a share of that time: on a busy machine all of it takes longer.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    text = "The old man looked at the sea, and said nothing.\n" * 21_000  # a MiB
    shares = []
    try:
        for _ in range(3):
            with ThreadPoolExecutor(1) as pool:
                sampling = {"max_new_tokens": 900, "temperature": 0.0}
                with client.open(prompt=PROMPT, sampling=sampling, stream=True) as lines:
                    next(lines)
                    tokenizing = pool.submit(client.post, "/tokenize", text=text)
                    times = [time.monotonic()]
                    for _line in lines:
                        times.append(time.monotonic())
                        if tokenizing.done():
                            break
                assert len(tokenizing.result().json()["ids"]) > 200_000
            shares.append(max(after - before for before, after in pairwise(times)) / (times[-1] - times[0]))
            if shares[-1] < 0.3:
                break
    finally:
        sys.setswitchinterval(interval_s)
    assert min(shares) < 0.3, shares


def test_a_prompt_that_is_too_long_is_refused_with_its_numbers(client: Endpoint) -> None:
    for fields in ({"prompt_ids": [5] * 1020}, {"prompt": " the" * 1020}):
        answer = problem(client.post("/generate", **fields, sampling=GREEDY))
        assert (answer["status"], answer["code"]) == (422, "prompt_too_long")
        assert re.search(r"\b1020\b.*max_new_tokens \(8\).*\b1024\b", answer["detail"])
    assert client.generate(prompt_ids=[5] * 1016, sampling=GREEDY)[-1]["num_prompt_tokens"] == 1016
    for fields in ({"prompt_ids": [5] * 1025}, {"prompt": " the" * 1025}, {"prompt": "the " * (1 << 18)}):
        scored: dict[str, Any] = {**fields, "sampling": {"max_new_tokens": 0}, "echo": True, "logprobs": 0}
        answer = problem(client.post("/generate", **scored))
        assert (answer["code"], "lower max_new_tokens" in answer["detail"]) == ("prompt_too_long", False)


def test_a_text_that_cannot_fit_is_refused_without_encoding_it(
    client: Endpoint, encoded: list[tuple[str, list[int]]]
) -> None:
    answer = problem(client.post("/generate", prompt="the " * (1 << 18), sampling=GREEDY))
    assert answer["code"] == "prompt_too_long"
    assert "1024" in answer["detail"]
    assert all(len(text) < 100 for text, _ in encoded)
