"""The score of a prompt: high for text that the model knows, low for other languages and scripts."""

from __future__ import annotations

import pytest

from shared.protocol import Accepted, Done, GenerateLine, GenerateRequest, Prediction, Sampling, Token
from tests.workers import slots
from tests.workers.helpers import wait_until
from workers.prompt_score import MIN_TOKENS
from workers.service import SlotService

KNOWN = (
    "The old man looked at the sea and thought of the days when he was young, and every morning he went out to fish."
)
GERMAN = (
    "Der alte Mann sah auf das Meer hinaus und dachte an die Zeit, als er noch jung war und jeden Morgen fischen ging."
)
HEBREW = "הזקן הביט בים וחשב על הימים שבהם היה עדיין צעיר ויצא בכל בוקר בסירתו לדוג."
CODE = "def submit(self, request):\n    codec = self._codec()\n    return [x for x in codec.ids(request) if x > 0]\n"


def lines_of(service: SlotService, prompt: str, **fields: object) -> list[GenerateLine]:
    return slots.lines_of(service, prompt, **{"max_prompt_tokens": 64, "heal": True, "score_last": 32, **fields})


def score(service: SlotService, prompt: str, **fields: object) -> float | None:
    done = lines_of(service, prompt, **fields)[-1]
    assert isinstance(done, Done), done
    return done.prompt_score


def test_it_tells_what_the_model_knows_from_what_it_does_not(service: SlotService) -> None:
    known = score(service, KNOWN)
    others = [score(service, text) for text in (GERMAN, HEBREW, CODE)]
    assert known is not None
    assert known > -1.5
    assert all(other is not None and other < -2.2 for other in others)


def test_an_emoji_or_a_foreign_letter_in_a_sentence_does_not_decide(service: SlotService) -> None:
    for text in (
        "A line before.\nCafé 😀 — The old man looked at the se",
        "He met Zoë 🎉🎉 and they went to the house to",
    ):
        found = score(service, text)
        assert found is not None
        assert found > -2.2


@pytest.mark.parametrize(
    "fields", [{"predict": Prediction()}, {"suffix": " and said nothing."}, {"sampling": Sampling(max_new_tokens=40)}]
)
def test_it_depends_on_the_last_tokens_alone(service: SlotService, fields: dict[str, object]) -> None:
    """Whatever makes the branch's text, and whatever precedes the tokens or is cached of them."""
    known = f"{KNOWN} It was late when he came home, and his wife was asleep."  # more than 33 tokens
    expected = score(service, known)
    assert score(service, f"{HEBREW} {known}", **fields) == expected
    assert score(service, known, **fields) == expected


@pytest.mark.parametrize(
    "text",
    [
        "# My title\n\nSome *text* here. ",
        "CHAPTER ONE\n\nTHE OLD HOUSE STOOD AT THE END OF THE",
        "Invoice 4711, 12.03.2024, 1,250.00, and 1,310.00 ",
        "| Name | Age |\n|---|---|\n| Tom | 42 |\n| Ann | ",
    ],
)
def test_marks_capitals_and_numbers_do_not_count(service: SlotService, text: str) -> None:
    assert score(service, text) is None


def test_a_short_prompt_and_one_of_which_it_was_not_requested_have_none(service: SlotService) -> None:
    assert score(service, "Dear Ms Patel,") is None
    assert score(service, "") is None
    assert score(service, " ".join(["sea"] * (MIN_TOKENS + 1)) + " ") is not None
    assert score(service, KNOWN, score_last=0) is None


def test_a_stream_says_it_with_its_first_token(service: SlotService) -> None:
    accepted, *tokens, done = lines_of(service, KNOWN, stream=True, heal=False)
    assert isinstance(accepted, Accepted)
    assert isinstance(done, Done)
    scores = [token.prompt_score for token in tokens if isinstance(token, Token)]
    assert scores == [done.prompt_score] + [None] * (len(scores) - 1)
    assert done.prompt_score is not None


def test_it_leaves_the_text_as_it_is(service: SlotService) -> None:
    sampling = Sampling(max_new_tokens=20, temperature=0.8)
    texts = [lines_of(service, KNOWN, sampling=sampling, seed=3, score_last=number)[-1] for number in (0, 32)]
    assert all(isinstance(line, Done) for line in texts)
    assert texts[0].text == texts[1].text  # type: ignore[union-attr]


def test_a_cancelled_branch_leaves_nothing_in_the_engine(service: SlotService) -> None:
    sampling = Sampling(max_new_tokens=900)
    branch = service.submit(GenerateRequest(prompt=KNOWN, score_last=32, score_prior=True, sampling=sampling))
    branch.cancel()
    assert isinstance([line for lines in branch for line in lines][-1], Done)
    branch.close()
    wait_until(lambda: service.state().in_flight == 0)


@pytest.mark.parametrize("prompt", ["", KNOWN, KNOWN.replace("The old", "“The old") + "”"])
def test_tokens_are_scored_without_their_prompt(service: SlotService, prompt: str) -> None:
    """Also where the text is respelled. Without a prompt, that is how likely they were."""
    done = lines_of(service, prompt, sampling=Sampling(max_new_tokens=12), seed=5, score_last=0, score_prior=True)[-1]
    assert isinstance(done, Done)
    assert done.prior_logprobs is not None
    assert (done.prior_logprobs == pytest.approx(done.logprobs, abs=0.01)) == (not prompt)
