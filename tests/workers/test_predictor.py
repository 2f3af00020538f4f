"""Predictions of a slot's service: distinct words by rank, the same for each branch, alone or in a crowd."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.protocol import Done, GenerateRequest, Group, Prediction, Sampling
from tests.workers.contract import PROMPT
from tests.workers.helpers import wait_until
from tests.workers.slots import done_of, warm_service
from workers.engine.model.config import SHAPES
from workers.predictor import max_predicted_tokens
from workers.service import SlotService


@pytest.fixture(scope="module")
def service() -> Iterator[SlotService]:
    with warm_service(max_batch=4) as service:
        yield service


def predict(
    service: SlotService, prompt: str = PROMPT, rank: int = 0, group: str = "", size: int = 1, **fields: object
) -> Done:
    prediction = Prediction(rank=rank, **fields)  # type: ignore[arg-type]
    groups = Group(id=group, size=size) if group else None
    return done_of(service, prompt, max_prompt_tokens=64, heal=True, predict=prediction, group=groups)


@pytest.mark.parametrize("prompt", [PROMPT, f"{PROMPT} s", "He said that it was impo", "", "Once upon a time "])
def test_ranks_have_distinct_first_words_and_descending_probabilities(service: SlotService, prompt: str) -> None:
    found = [predict(service, prompt, rank) for rank in range(3)]
    firsts = [done.text.split()[0] if done.text[:1] == " " else done.text.split(" ")[0] for done in found]
    assert len(set(firsts)) == 3
    assert all(done.usefulness is not None and done.usefulness >= 0 for done in found)
    assert not any("\n" in done.text for done in found)
    assert all(done.ends[-1] == len(done.text) for done in found)


def test_a_rank_does_not_depend_on_siblings_or_on_other_requests(service: SlotService) -> None:
    alone = [predict(service, rank=rank, group=f"alone {rank}", size=3) for rank in range(3)]
    with ThreadPoolExecutor(12) as pool:
        crowd = [pool.submit(predict, service, f"It was raining when {number}") for number in range(2)]
        group = [pool.submit(predict, service, rank=rank, group="one", size=3) for rank in range(3)]
        together = [future.result() for future in group]
        for future in crowd:
            future.result()
    assert [(done.text, done.usefulness) for done in together] == [(done.text, done.usefulness) for done in alone]


def test_requests_with_the_same_id_have_searches_of_their_own(service: SlotService) -> None:
    """Clients choose the ids of their requests, so two at a time may have the same."""
    prompts = [PROMPT, "It was raining when w", "He said that it was impo"]
    expected = [predict(service, prompt, group="first", size=3).text for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            found = list(pool.map(lambda prompt: predict(service, prompt, group="same", size=3).text, prompts))
            assert found == expected


@pytest.mark.parametrize(
    ("name", "num_tokens"), [("small", 8), ("medium", 3)], ids=["124 million weights", "355 million weights"]
)
def test_a_large_model_predicts_fewer_tokens_on_a_cpu(name: str, num_tokens: int) -> None:
    assert max_predicted_tokens(SHAPES[name].num_weights_read) == num_tokens
    assert max_predicted_tokens(0) == 8  # a GPU


def test_beyond_the_last_prediction_the_text_is_empty(service: SlotService) -> None:
    """Eight paths, some of which begin with the same word, have no eighth word."""
    found = [predict(service, f"{PROMPT} sai", rank) for rank in range(8)]
    assert found[0].text
    assert (found[-1].text, found[-1].usefulness) == ("", 0.0)


@pytest.mark.parametrize(
    ("end", "correction"),
    [("The people chose a new goverm", "government"), ("They lost their posess", ""), ("A quorvex is a quorv", None)],
    ids=["misspelled", "several spellings", "known from the text"],
)
def test_a_misspelled_word_has_at_most_a_correction(service: SlotService, end: str, correction: str | None) -> None:
    first, second = (predict(service, end, rank, corrects=True) for rank in range(2))
    uncorrected = predict(service, end)
    if correction is None:
        assert (first.text[:2], first.replaces) == (uncorrected.text[:2], 0) == ("ex", 0)
    else:
        assert (first.text, first.replaces) == (correction, 6)
        assert (second.text, uncorrected.text, uncorrected.replaces) == ("", "", 6)


def test_verbatim_predictions_are_not_cut(service: SlotService) -> None:
    prompts = [PROMPT, "It was raining when", "Once upon a time there was", "He shook his head, and said that he did"]
    pairs = [(predict(service, prompt), predict(service, prompt, is_verbatim=True)) for prompt in prompts]
    assert all(whole.text.startswith(cut.text) and whole.ends[-1] == len(whole.text) for cut, whole in pairs)
    assert any(len(whole.text) > len(cut.text) for cut, whole in pairs)


def test_the_last_branch_to_leave_cancels_the_search() -> None:
    with warm_service(max_batch=4, step_delay_s=0.5) as service:
        requests = [
            GenerateRequest(
                prompt=PROMPT,
                heal=True,
                predict=Prediction(rank=rank),
                group=Group(id="g", size=2),
                sampling=Sampling(max_new_tokens=8),
            )
            for rank in range(2)
        ]
        first, second = (service.submit(request) for request in requests)
        wait_until(lambda: service.state().in_flight == 8)
        first.cancel()
        first.cancel()
        assert service.state().in_flight == 8
        second.close()
        assert service.state().in_flight == 0
        first.close()
        assert service.state().counters["sequences.cancelled"] == 2
