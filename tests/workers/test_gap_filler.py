"""Fills of a gap by a slot's service: they stand before the text after it, and are the same in any company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from shared.protocol import Accepted, Done, GenerateRequest, Group, Prediction, Sampling, TokenizeRequest
from tests.workers.contract import PROMPT
from tests.workers.helpers import wait_until
from tests.workers.slots import done_of, lines_of, warm_service
from workers.service import SlotService

AFTER = " and said nothing."


def fill(service: SlotService, prompt: str | None, suffix: str = AFTER, **fields: object) -> Done:
    fields = {"max_prompt_tokens": 64, "heal": True, "suffix": suffix, **fields}
    accepted, done = lines_of(service, prompt, **fields)
    assert isinstance(accepted, Accepted)
    assert isinstance(done, Done), done
    assert done.ends[-1] == len(done.text)
    return done


def predicted(service: SlotService, prompt: str, suffix: str = AFTER, group: str = "") -> list[Done]:
    groups = Group(id=group, size=3) if group else None
    return [fill(service, prompt, suffix, predict=Prediction(rank=rank), group=groups) for rank in range(3)]


@pytest.mark.parametrize("prompt", ["The old man looked at", "The old man looked at ", "The old man lo", ""])
def test_predictions_come_best_fit_first_with_distinct_words(service: SlotService, prompt: str) -> None:
    found = predicted(service, prompt)
    fits = [done.fit for done in found]
    assert all(before is not None and after is not None and before >= after for before, after in pairwise(fits))
    firsts = [done.text.split()[0] for done in found]
    assert len(set(firsts)) == 3
    assert not any(done.text.endswith((" and", AFTER)) for done in found)
    assert {done.finish_reason for done in found} == {"stop"}


def test_the_text_after_the_gap_decides(service: SlotService) -> None:
    afters = (" whether she was happy, and she", " to London, and they", ".\n\n")
    texts = [tuple(done.text for done in predicted(service, "He asked the ", after)) for after in afters]
    assert len(set(texts)) > 1


def test_inside_a_word_its_parts_are_joined(service: SlotService) -> None:
    found = fill(service, "She was very beautiful. It was a wond", "ful day", predict=Prediction())
    assert found.text == "er"


def test_a_missing_space_comes_with_the_fill(service: SlotService) -> None:
    assert fill(service, "He opened the ", "of the house and left.", predict=Prediction()).text.endswith(" ")


def test_fills_have_words_with_probabilities(service: SlotService) -> None:
    found = predicted(service, "The old man looked at ", " and said nothing.")
    for done in found:
        assert done.words is not None
        assert done.words[-1].end == len(done.text.rstrip())
        probabilities = [word.probability for word in done.words]
        assert probabilities == sorted(probabilities, reverse=True)
    assert sum(done.words[0].probability for done in found if done.words) <= 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("He opened the ", "door and left the house."),
        ("She did not know what to", " say to him."),
    ],
)
def test_where_nothing_is_missing_nothing_is_suggested(service: SlotService, before: str, after: str) -> None:
    assert [done.text for done in predicted(service, before, after)] == ["", "", ""]


def test_samples_are_cut_and_never_streamed(service: SlotService) -> None:
    for seed in range(3):
        sampling = Sampling(max_new_tokens=20, temperature=0.8)
        done = fill(service, PROMPT, AFTER, sampling=sampling, seed=seed, stream=True, logprobs=1)
        whole = done_of(service, PROMPT, max_prompt_tokens=64, heal=True, sampling=sampling, seed=seed)
        assert whole.token_ids == done.token_ids
        assert whole.text.startswith(done.text)
        assert AFTER not in done.text
        assert (done.fit is None) == (done.text == "")


def test_token_ids_and_a_full_context_are_filled_too(service: SlotService) -> None:
    sampling = Sampling(max_new_tokens=8, temperature=0)
    ids = service.tokenize(TokenizeRequest(text="The old man looked at")).result().ids
    short = fill(service, None, prompt_ids=ids, heal=False, max_prompt_tokens=None, sampling=sampling)
    assert short.text == fill(service, "The old man looked at", heal=False, sampling=sampling).text
    whole = (ids * 400)[-1016:]
    assert fill(service, None, prompt_ids=whole, heal=False, max_prompt_tokens=None, sampling=sampling).fit
    assert fill(service, "The old man looked at " * 300, sampling=sampling, max_prompt_tokens=1016).fit


def test_a_fill_does_not_depend_on_siblings_or_on_other_requests(service: SlotService) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=0.9)
    alone = [(done.text, done.fit, done.usefulness) for done in predicted(service, "The old man looked at")]
    sample = fill(service, "She opened", sampling=sampling, seed=7)
    with ThreadPoolExecutor(12) as pool:
        crowd = [pool.submit(predicted, service, f"It was raining when {number}") for number in range(2)]
        crowd_samples = [
            pool.submit(fill, service, f"He said {number}", sampling=sampling, seed=number) for number in range(2)
        ]
        groups = [pool.submit(predicted, service, "The old man looked at", AFTER, f"group {n}") for n in range(2)]
        again = [pool.submit(fill, service, "She opened", sampling=sampling, seed=7) for _ in range(2)]
        assert all(future.result() for future in crowd)
        assert all(future.result().text for future in crowd_samples)
    for future in groups:
        found = future.result()
        assert [done.text for done in found] == [text for text, _, _ in alone]
        assert [done.fit for done in found] == pytest.approx([fit for _, fit, _ in alone], abs=1e-3)
    assert [future.result().text for future in again] == [sample.text] * 2


def test_searches_with_another_text_after_the_gap_are_others(service: SlotService) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(lambda after: predicted(service, "He opened the ", after, "same"), [" and left.", "door."])
        )
    assert found[0][0].text != found[1][0].text


def test_cancelling_ends_the_scoring() -> None:
    with warm_service(max_batch=4, step_delay_s=0.05) as service:
        request = GenerateRequest(prompt=PROMPT, suffix=AFTER, heal=True, predict=Prediction())
        branch = service.submit(request)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(lambda: [*branch])
            wait_until(lambda: service.state().in_flight > 8)  # more than there are paths
            branch.cancel()
            reading.result()
        branch.close()
        assert service.state().in_flight == 0


def test_at_the_deadline_a_fill_is_returned() -> None:
    with warm_service(max_batch=4, step_delay_s=0.05) as service:
        sampling = Sampling(max_new_tokens=200, temperature=0)
        done = fill(service, PROMPT, sampling=sampling, deadline_ms=1500)
        assert done.finish_reason == "deadline"
        assert done.text
