"""The simulated writers, on texts short enough to count their keys."""

from __future__ import annotations

from itertools import islice

import pytest

from deploy.bench.quality import writers
from deploy.bench.quality.keystrokes import Answer, Suggest
from deploy.bench.quality.writers import PageWriter, Writer, matching_length, write_by_literature, write_by_pause
from deploy.load.passages import Passage

LATENCY_MS = 12.0
RULES = [write_by_literature, PageWriter(), PageWriter(1), write_by_pause]


def passage(text: str, end: int | None = None) -> Passage:
    positions = [0, *(at + 1 for at, letter in enumerate(text) if letter == " ")]
    return Passage("f", text, 0, len(text) if end is None else end, tuple(positions))


def answers(by_position: dict[int, list[str]], latency_ms: float = LATENCY_MS) -> Suggest:
    return lambda position: Answer(tuple(by_position.get(position, [])), latency_ms)


def following(text: str, num_characters: int = 100) -> Suggest:
    """Always right: the text itself."""
    return lambda position: Answer((text[position : position + num_characters],), LATENCY_MS)


@pytest.mark.parametrize(
    ("suggestion", "text", "length"),
    [
        ("the sea and", "the sea was", 8),
        ("the sea", "the season", 4),
        ("the season", "the sea", 4),
        ("the sea", "the sea", 7),
        ("them", "the", 0),
        ("", "the", 0),
        ("the sea.", "the sea, and", 7),
    ],
)
def test_a_suggestion_matches_up_to_the_end_of_a_word(suggestion: str, text: str, length: int) -> None:
    assert matching_length(suggestion, text) == length


@pytest.mark.parametrize("write", RULES)
@pytest.mark.parametrize("suggested", [{}, {0: ["no such"], 4: ["nor this", "nor that"]}])
def test_without_a_matching_suggestion_every_character_is_a_key(write: Writer, suggested: dict[int, list[str]]) -> None:
    usage = write(passage("the old man"), answers(suggested), 3)
    assert (usage.num_keys, usage.num_characters, usage.num_accepted) == (11, 11, 0)


def test_literature_charges_one_key_for_any_place_and_gives_the_space() -> None:
    """ "the old man": "t" is typed. At 1 the second suggestion "he old" and the space after it cost one key: 8
    characters. At 8, "man" ends the text: one key, no space. 3 keys in all, at 3 moments."""
    suggested = {1: ["hat", "he old"], 8: ["man"]}
    usage = write_by_literature(passage("the old man"), answers(suggested), 2)
    assert (usage.num_keys, usage.num_moments, usage.num_accepted) == (3, 3, 2)
    assert (usage.num_moments_shown, usage.num_kept_characters, usage.num_accepted_words) == (2, 10, 3)
    # With one on show: "t", then "he old " character by character (7 keys), then "man".
    assert write_by_literature(passage("the old man"), answers(suggested), 1).num_keys == 9


def test_literature_has_no_space_before_punctuation() -> None:
    """ "sea, and": "sea" costs one key and the comma follows at once; "," and " " are typed; "and" costs one: 4."""
    usage = write_by_literature(passage("sea, and"), answers({0: ["sea"], 5: ["and"]}), 1)
    assert usage.num_keys == 4


def test_literature_takes_the_longest() -> None:
    """ "the old man sat": "the old man" with its space is 12 characters for one key; "sat" is typed: 4 keys."""
    suggested = {0: ["the", "the old man went", "the old"]}
    assert write_by_literature(passage("the old man sat"), answers(suggested), 3).num_keys == 4


def test_literature_takes_what_follows_a_word() -> None:
    """ "a man": "a" is typed; at 1, " man" is four characters for one key: 2 keys."""
    assert write_by_literature(passage("a man"), answers({1: [" man"]}), 1).num_keys == 2


def test_literature_ends_with_the_passage() -> None:
    """The passage ends after "the old ": the suggestion goes further, and counts up to there: 8 characters, 1 key."""
    usage = write_by_literature(passage("the old man", 8), following("the old man"), 1)
    assert (usage.num_keys, usage.num_characters, usage.num_kept_characters) == (1, 8, 8)


def test_pause_charges_an_arrow_for_other_places_than_the_first() -> None:
    """ "the old man looked": the second suggestion gives "the old man " for two keys, then "looked" costs one: 3. With
    one on show, the 12 characters are typed, and "looked" costs one: 13."""
    text, suggested = "the old man looked", {0: ["thus", "the old man sat"], 12: ["looked"]}
    assert write_by_pause(passage(text), answers(suggested), 1).num_keys == 13
    assert write_by_pause(passage(text), answers(suggested), 2).num_keys == 3
    assert write_by_pause(passage("a b"), answers({0: ["a b"], 2: ["b"]}), 3).num_keys == 1


def test_pause_has_suggestions_at_the_starts_of_words_only_and_types_the_space() -> None:
    """ "the old": at 1 nothing is requested. "the" costs one key, the space another, "old" one: 3."""
    assert write_by_pause(passage("the old"), answers({1: ["he old"]}), 1).num_keys == 7
    assert write_by_pause(passage("the old"), answers({0: ["the"], 4: ["old"]}), 1).num_keys == 3


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
def test_page_keeps_what_holds_and_moves_it_up() -> None:
    """At 0: "to be" and "the sea". "t" and "h" are typed. At 2 "to be" has left, and "e sea" moved up; it is visible
    for 192 ms at the next key, which types "e", and Tab takes " sea": 4 keys. "hat" at 1 comes after what holds."""
    suggested = {0: ["to be", "the sea"], **{at: ["hat"] for at in range(1, 7)}}
    usage = PageWriter()(passage("the sea"), answers(suggested), 2)
    assert (usage.num_keys, usage.num_holding, usage.num_replaced) == (4, 4, 0)


@pytest.mark.usefixtures("regular_rhythm")
def test_page_brings_a_space_that_gives_way_to_punctuation() -> None:
    """ "a sea, an": " sea" brings a space, which the comma replaces; " an" is typed: "a", " ", Tab, ",", " ", "a", "n".
    Before a letter the space is deleted: "a", " ", Tab, backspace, "b"."""
    assert PageWriter()(passage("a sea, an"), answers({0: ["a sea"]}), 1).num_keys == 6
    assert PageWriter()(passage("a seab"), answers({0: ["a sea"]}), 1).num_keys == 4


@pytest.mark.usefixtures("regular_rhythm")
def test_page_holds_back_what_saves_little_until_it_is_typed() -> None:
    """Usefulness 0.5 and a minimum of 2: shown after two typed characters, taken a key later."""

    def suggest(at: int) -> Answer:
        return Answer(("the sea",), 12.0, (0.5,)) if at == 0 else Answer((), 12.0)

    assert PageWriter(0.5)(passage("the sea"), suggest, 1).num_keys == 2
    held_back = PageWriter(2)(passage("the sea"), suggest, 1)
    assert held_back.num_keys == 4
    assert held_back.num_moments_shown == 2


def test_the_rhythm_has_five_keys_a_second() -> None:
    intervals_ms = list(islice(writers.key_intervals_ms(3), 20_000))
    assert 195 < sum(intervals_ms) / len(intervals_ms) < 205
    assert min(intervals_ms) > 0


@pytest.mark.usefixtures("regular_rhythm")
def test_page_takes_word_by_word_what_does_not_match_as_a_whole() -> None:
    """ "the old man sat": at 0 "the old man was very". "t"; then a chord takes "he", and arrow right alone " old" and
    " man": 4 keys for 11 characters with the space. "sat" is typed: 1 + 4 + 3 = 8."""
    usage = PageWriter()(passage("the old man sat"), answers({0: ["the old man was very"]}), 1)
    assert (usage.num_keys, usage.num_accepted, usage.num_accepted_words) == (8, 1, 3)
    assert usage.num_accepted_characters == usage.num_kept_characters == 11


@pytest.mark.usefixtures("regular_rhythm")
def test_page_deletes_what_does_not_match_and_shows_nothing_after_it() -> None:
    """ "the season. it": at 0 "the seasons". "t"; Tab takes "he seasons ", backspace removes " " and "s": 3 keys for 9
    characters. Nothing is requested at 10, where the second place would be free: ". it" is 4 keys. 8 in all. Moments:
    0, 1, the deletion, and the positions 11 to 13."""
    suggested = {0: ["the seasons"], 10: [". it"]}
    usage = PageWriter()(passage("the season. it"), answers(suggested), 2)
    assert (usage.num_keys, usage.num_moments) == (8, 6)
    assert (usage.num_accepted_characters, usage.num_kept_characters) == (11, 9)


@pytest.mark.usefixtures("regular_rhythm")
def test_page_drops_answers_after_the_next_key() -> None:
    """Answers take 250 ms, and a key comes every 200: nothing is ever on show."""
    usage = PageWriter()(passage("the sea"), answers({0: ["the sea"], 1: ["he sea"]}, 250), 1)
    assert (usage.num_keys, usage.num_moments_shown) == (7, 0)


def test_flicker_counts_suggestions_that_held_and_left_their_place() -> None:
    """ "then" by literature. At 1 the rests "he man" and "hy" hold; the answer swaps them: 2 replaced. At 2 the rests
    "y" and "e man" hold; the answer replaces the first and continues the second: 1 replaced. At 3 the rests "bb" and
    " man of" hold; the answer shortens the second: none replaced."""
    suggested = {0: ["the man", "thy"], 1: ["hy", "he man"], 2: ["ebb", "e man of"], 3: ["bb", " man"]}
    usage = write_by_literature(passage("then"), answers(suggested), 2)
    assert (usage.num_keys, usage.num_holding, usage.num_replaced) == (4, 6, 3)


@pytest.mark.parametrize("write", RULES)
def test_no_rule_presses_more_keys_than_typing(write: Writer) -> None:
    text = "It was the sea, and the sea was old. " * 3
    usage = write(passage(text), following(text, 9), 1)
    assert 0 < usage.num_keys < len(text)
    assert usage.num_kept_characters <= usage.num_accepted_characters
