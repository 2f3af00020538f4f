"""The simulated writers, on texts short enough to count their keys."""

from __future__ import annotations

import pytest

from deploy.load.passages import Passage
from tests.bench.quality import writers
from tests.bench.quality.keystrokes import Answer, Suggest
from tests.bench.quality.writers import PageWriter, write_by_literature, write_by_pause

LATENCY_MS = 12.0


def passage(text: str, end: int | None = None) -> Passage:
    return Passage("f", text, 0, len(text) if end is None else end)


def answers(by_position: dict[int, list[str]], latency_ms: float = LATENCY_MS) -> Suggest:
    return lambda position: Answer(tuple(by_position.get(position, [])), latency_ms)


def following(text: str, num_characters: int = 100) -> Suggest:
    """Always right: the text itself."""
    return lambda position: Answer((text[position : position + num_characters],), LATENCY_MS)


def test_literature_charges_one_key_for_any_place_and_gives_the_space() -> None:
    """ "the old man": "t" is typed. At 1 the second suggestion "he old" and the space after it cost one key: 8
    characters. At 8, "man" ends the text: one key, no space. 3 keys in all, at 3 moments."""
    suggested = {1: ["hat", "he old"], 8: ["man"]}
    usage = write_by_literature(passage("the old man"), answers(suggested), 2)
    assert (usage.num_keys, usage.num_moments, usage.num_accepted) == (3, 3, 2)
    assert (usage.num_moments_shown, usage.num_kept_characters, usage.num_accepted_words) == (2, 10, 3)
    # With one on show: "t", then "he old " character by character (7 keys), then "man".
    assert write_by_literature(passage("the old man"), answers(suggested), 1).num_keys == 9


def test_pause_asks_at_the_start_of_each_word_and_charges_two_keys_for_another_than_the_first() -> None:
    """ "the old man": at 0 "the old" is the second: 2 keys. The space. At 8 "man" is the first: 1 key. Positions 1 and
    7 start no word and are not requested."""
    suggested = {0: ["thy", "the old"], 1: ["he old man"], 7: [" man"], 8: ["man"]}
    usage = write_by_pause(passage("the old man"), answers(suggested), 2)
    assert (usage.num_keys, usage.num_moments, usage.num_accepted, usage.num_kept_characters) == (4, 2, 2, 10)
    # With one on show: "the old " character by character (8 keys), then "man".
    assert write_by_pause(passage("the old man"), answers(suggested), 1).num_keys == 9


def test_pause_takes_nothing_that_costs_what_it_saves() -> None:
    assert write_by_pause(passage("to a"), answers({0: ["no", "to"], 3: ["a"]}), 2).num_accepted == 0


@pytest.fixture
def regular_rhythm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key every 200 ms. Answers take 12 ms and painting 8: visible for 180 ms at the next key, for 380 one later."""
    monkeypatch.setattr(writers, "RHYTHM_SIGMA", 0.0)


@pytest.mark.usefixtures("regular_rhythm")
def test_page_takes_only_what_has_been_visible_for_200_ms() -> None:
    """ "the sea" is on show from 0 on: "t" is typed, then Tab takes "he sea": 2 keys. What is on show from 1 on could
    be taken at 2, but does not hold there: 7 keys."""
    assert PageWriter()(passage("the sea"), following("the sea"), 1).num_keys == 2
    assert PageWriter()(passage("the sea"), answers({1: ["hey"]}), 1).num_keys == 7


@pytest.mark.usefixtures("regular_rhythm")
def test_page_holds_back_what_saves_little_until_it_is_typed() -> None:
    """Usefulness 0.5 and a minimum of 2: shown after two typed characters, taken a key later."""

    def suggest(at: int) -> Answer:
        return Answer(("the sea",), 12.0, (0.5,)) if at == 0 else Answer((), 12.0)

    assert PageWriter(0.5)(passage("the sea"), suggest, 1).num_keys == 2
    held_back = PageWriter(2)(passage("the sea"), suggest, 1)
    assert held_back.num_keys == 4
    assert held_back.num_moments_shown == 2


@pytest.mark.usefixtures("regular_rhythm")
def test_page_deletes_what_does_not_match_and_shows_nothing_after_it() -> None:
    """ "the season. it": at 0 "the seasons". "t"; Tab takes "he seasons ", backspace removes " " and "s": 3 keys for 9
    characters. Nothing is requested at 10, where the second place would be free: ". it" is 4 keys. 8 in all. Moments:
    0, 1, the deletion, and the positions 11 to 13."""
    suggested = {0: ["the seasons"], 10: [". it"]}
    usage = PageWriter()(passage("the season. it"), answers(suggested), 2)
    assert (usage.num_keys, usage.num_moments) == (8, 6)
    assert (usage.num_accepted_characters, usage.num_kept_characters) == (11, 9)
