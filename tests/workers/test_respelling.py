"""Texts with marks that the model does not know get what their plain spelling gets, spelled as they are."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from shared.protocol import Done, Prediction, Sampling, TokenizeRequest
from tests.workers.helpers import EMBEDDED
from tests.workers.slots import done_of
from workers.service import SlotService
from workers.text.token_healing import TokenHealing
from workers.text.tokenizer import Tokenizer
from workers.text.typography import PLAIN, Typography

CURLY = "“I don’t know what you mean,” she said. “It’s only a dream—and he’s gone… You’d almost"
PLAIN_TEXT = Typography(PLAIN).plain(CURLY)
SAMPLED = {"sampling": Sampling(max_new_tokens=40), "seed": 11}
PREDICTED = {"predict": Prediction(rank=0), "sampling": Sampling(max_new_tokens=8)}


def done(service: SlotService, prompt: str, **fields: Any) -> Done:
    return done_of(service, prompt, **{"max_prompt_tokens": 200, "heal": True, "special_as_text": True, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        SAMPLED,
        PREDICTED,
        {**SAMPLED, "heal": False},
        {**SAMPLED, "suffix": " and gone,” he said."},
        {**PREDICTED, "suffix": " it—and so on"},
        {**SAMPLED, "score_last": 32},
        {**SAMPLED, "logprobs": 2},
        {**SAMPLED, "special_as_text": False},
        {"sampling": Sampling(max_new_tokens=40, stop=("…", "”", "\r\n")), "seed": 3},
    ],
    ids=str,
)
def test_curly_text_gets_what_straight_text_gets(service: SlotService, fields: dict[str, Any]) -> None:
    typed = done(service, CURLY, **fields)
    plain = Typography(PLAIN).plain
    sampling = fields["sampling"]
    stop = {"sampling": Sampling(max_new_tokens=sampling.max_new_tokens, stop=tuple(map(plain, sampling.stop)))}
    straight = done(service, PLAIN_TEXT, **{**fields, **stop, "suffix": plain(fields.get("suffix", ""))})
    assert (typed.token_ids, typed.logprobs) == (straight.token_ids, straight.logprobs)
    assert (typed.usefulness, typed.fit, typed.prompt_score) == (
        straight.usefulness,
        straight.fit,
        straight.prompt_score,
    )
    assert plain(typed.text) == straight.text
    assert not {'"', "'"} & {*typed.text}
    assert len(typed.ends) == len(typed.token_ids)
    if fields.get("logprobs"):
        assert typed.token_texts is not None
        assert "".join(typed.token_texts).endswith(typed.text)


@pytest.mark.parametrize(
    "raw",
    [
        {"special_as_text": False, "heal": False, "logprobs": 1},
        {"special_as_text": False, "heal": False, "echo": True},
        {"special_as_text": False, "heal": False, "echo": True, "logprobs": 0},
    ],
    ids=str,
)
def test_scores_and_tokens_of_a_raw_prompt_are_its_own(service: SlotService, raw: dict[str, Any]) -> None:
    with closing(service.tokenize(TokenizeRequest(text=CURLY))) as tokenization:
        ids = tokenization.result().ids
    found = done(service, CURLY, **raw)
    assert found.num_prompt_tokens == len(ids)
    if raw.get("echo"):
        assert (found.prompt_text, found.prompt_ids) == (CURLY, ids)


@pytest.mark.parametrize("end", ["\xa0", "\u2003", "\u202f", " \xa0", "\u3000 ", "\t"])
def test_white_space_before_the_caret_counts_as_a_space(service: SlotService, end: str) -> None:
    for seed in range(3):
        fields = {"sampling": Sampling(max_new_tokens=6), "seed": seed}
        text = done(service, f"Dear{end}", **fields).text
        assert text == done(service, "Dear" + " " * len(end), **fields).text
        assert not text.startswith(" ")


def test_spaces_at_the_end_are_plain_for_a_model_that_knows_them() -> None:
    healing = TokenHealing(Tokenizer.from_directory(EMBEDDED, 8192))
    for text in ("Dear\xa0", "Dear \u2009", "Dear\u3000"):
        stem, typed = healing.split(text)
        assert (stem + typed.decode()) == "Dear" + " " * (len(text) - 4)


def test_a_paragraph_after_crlf_begins_like_one_after_lf(service: SlotService) -> None:
    unix = "It was late.\n\nHe had gone.\n\n"
    for seed in range(3):
        fields = {"sampling": Sampling(max_new_tokens=40), "seed": seed}
        expected = done(service, unix, **fields).text
        assert done(service, unix.replace("\n", "\r\n"), **fields).text == expected.replace("\n", "\r\n")
