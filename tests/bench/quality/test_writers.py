"""The simulated writers, on texts short enough to count their keys; and what predictions are compared with."""

from __future__ import annotations

import random

import pytest

from tests.bench.quality import writers
from tests.bench.quality.keystrokes import Answer, Suggest
from tests.bench.quality.passages import Passage, choose_passages, trim_context
from tests.bench.quality.predictions import Place, is_acceptable, stated_rows
from tests.bench.quality.writers import (
    PageWriter,
    comes_next,
    first_sentence,
    pause_before,
    write_by_literature,
)

LATENCY_MS = 12.0
LISTED = {4: ["When", "Then they left."], 9: ["x", "they left."]}
TEXT = "the old man looked at the sea " * 100


def passage(text: str) -> Passage:
    return Passage("f", text, 0, len(text))


def answers(by_position: dict[int, list[str]], latency_ms: float = LATENCY_MS) -> Suggest:
    return lambda position: Answer(tuple(by_position.get(position, [])), latency_ms)


def following(text: str) -> Suggest:
    """Always right: the text itself."""
    return lambda position: Answer((text[position:],), LATENCY_MS)


def test_literature_charges_one_key_for_any_place_and_gives_the_space() -> None:
    """ "the old man": "t" is typed. At 1 the second suggestion "he old" and the space after it cost one key: 8
    characters. At 8, "man" ends the text: one key, no space. 3 keys in all, at 3 moments."""
    suggested = {1: ["hat", "he old"], 8: ["man"]}
    usage = write_by_literature(passage("the old man"), answers(suggested), 2)
    assert (usage.num_keys, usage.num_moments, usage.num_accepted) == (3, 3, 2)
    assert (usage.num_moments_shown, usage.num_kept_characters, usage.num_accepted_words) == (2, 10, 3)
    # With one on show: "t", then "he old " character by character (7 keys), then "man".
    assert write_by_literature(passage("the old man"), answers(suggested), 1).num_keys == 9


@pytest.fixture
def regular_rhythm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key every 200 ms. Answers take 12 ms and painting 8: visible for 180 ms at the next key, for 380 one later."""
    monkeypatch.setattr(writers, "RHYTHM_SIGMA", 0.0)


@pytest.mark.usefixtures("regular_rhythm")
@pytest.mark.parametrize(
    ("text", "suggest", "writer", "num_shown", "num_keys"),
    [
        # On show from 0 on: "t" is typed, then Tab takes "he sea".
        ("the sea", following("the sea"), PageWriter(), 1, 2),
        # On show from 1 on, it could be taken at 2, but does not hold there.
        ("the sea", answers({1: ["hey"]}), PageWriter(), 1, 7),
        # From the list, at a pause only.
        ("So. Then they left.", answers(LISTED), PageWriter(think=answers({})), 2, 4 + 2),
        ("So. Then they left.", answers(LISTED), PageWriter(), 2, 4 + 3),
    ],
)
def test_page_takes_only_what_has_been_visible_for_200_ms(
    text: str, suggest: Suggest, writer: PageWriter, num_shown: int, num_keys: int
) -> None:
    assert writer(passage(text), suggest, num_shown).num_keys == num_keys


@pytest.mark.usefixtures("regular_rhythm")
def test_page_holds_back_what_saves_little_until_an_estimate_says_more() -> None:
    """Of "the sea" and a minimum of 1: what is held back at 0 stays so; at 3 another estimate shows it, a key later it
    is taken. An acceptance changes nothing."""

    def keys(usefulness: dict[int, float]) -> int:
        def suggest(at: int) -> Answer:
            return Answer(("the sea"[at:],), LATENCY_MS, (usefulness[at],)) if at in usefulness else Answer()

        return PageWriter(1)(passage("the sea"), suggest, 1).num_keys

    assert (keys({0: 1.0}), keys({0: 0.5}), keys({0: 0.5, 3: 1.0}), keys({0: 0.5, 3: 0.9})) == (2, 7, 5, 7)


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
def test_page_shows_an_idea_where_the_writer_thinks() -> None:
    """ "He left. She stayed there.": an idea, cut to its sentence, comes in the pause before "She". Tab takes it; its
    space is replaced by nothing: backspace, then the rest of the text is typed."""
    text = "He left. She stayed there."
    ideas = {9: ["She stayed! And then", "He"]}
    asked: list[int] = []

    def think(at: int) -> Answer:
        asked.append(at)
        return answers(ideas)(at)

    usage = PageWriter(2, think)(passage(text), answers({}), 3)
    assert asked == [9]
    assert (usage.num_pauses, usage.num_pauses_shown, usage.num_pauses_taken) == (1, 1, 1)
    # 9 keys, Tab takes "She stayed! ", of which "She stayed" is right: Tab, 2 deletions, " there." 7 keys.
    assert usage.num_keys == 9 + 1 + 2 + 7


@pytest.mark.usefixtures("regular_rhythm")
def test_page_keeps_what_is_on_show_unless_an_idea_continues_it() -> None:
    text = "It is so. The sea was calm."

    def suggest(at: int) -> Answer:
        return Answer(("The sea",) if at == 10 else (), LATENCY_MS, (6.0,) if at == 10 else ())

    def keys(idea: str) -> int:
        return PageWriter(2, answers({10: [idea]}))(passage(text), suggest, 3).num_keys

    assert keys("A gull") == 10 + 1 + 9  # Tab takes "The sea "
    assert keys("The sea was calm.") == 10 + 1


@pytest.mark.usefixtures("regular_rhythm")
def test_page_lists_the_other_ideas_where_the_writer_thinks() -> None:
    """Three predictions save too little to be shown. The second idea that begins otherwise is taken by two keys."""
    text = "So. They left."

    def suggest(at: int) -> Answer:
        return Answer(("We had", "They were", "It"), LATENCY_MS, (0.5, 0.4, 0.3)) if at == 4 else Answer((), LATENCY_MS)

    usage = PageWriter(2, answers({4: ["We had gone.", "We", "They"]}))(passage(text), suggest, 3)
    assert usage.num_keys == 4 + 2 + 5
    assert (usage.num_pauses_shown, usage.num_pauses_taken) == (1, 1)


@pytest.mark.parametrize(
    ("text", "at", "ms"),
    [("He left. She", 9, 3000), ("He left, and", 9, 1800), ('"Oh!" he', 6, 3000), ("a\nb", 2, 3000), ("a b", 2, 0)],
)
def test_a_writer_thinks_before_sentences_and_after_punctuation(text: str, at: int, ms: float) -> None:
    assert pause_before(text, at) == ms


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (" and went, as he. No", " and went, as he."),
        (" a sea — and", " a sea — and"),
        ("\n\nNo", "\n\nNo"),
        (" 3.5 miles. He", " 3.5 miles."),
        (' now." She', ' now."'),
        (" all", " all"),
    ],
)
def test_an_idea_ends_with_its_first_sentence(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


@pytest.mark.usefixtures("regular_rhythm")
def test_page_counts_moments_with_another_guess_and_those_at_which_all_of_the_first_one_comes_next() -> None:
    """ "them" leaves with the space, and "see" takes its place. "the sea" is right, and so is what is left of it."""
    assert PageWriter()(passage("the sea"), answers({0: ["them"], 4: ["see"]}), 1).num_changed == 1
    usage = PageWriter()(passage("the sea is"), answers({0: ["the sea"], 8: ["isle"]}), 1)
    assert (usage.num_moments_shown, usage.num_moments_right) == (4, 2)
    assert (comes_next("the se", "the sea", 0), comes_next("the sea", "the sea", 0)) == (False, True)


def test_words_and_keys_are_right_up_to_the_first_word_that_does_not_come_next() -> None:
    answer = Answer(("sea at the",), usefulness=(4.0,), words=((("sea", 0.9), (" at", 0.82), (" the", 0.3)),))
    rows = stated_rows("m", [Place("append", "the sea at noon", 4)], [answer])
    assert [(row["of"], row["cases"], row["true"]) for row in rows] == [
        ("0.3", 1, 0),
        ("0.8", 1, 1),
        ("0.9", 1, 1),
        ("keys", 1, 5),
    ]


def test_what_is_shown_begins_with_an_acceptable_text_or_is_its_beginning() -> None:
    shown = ("", "the  sea ", "the sea is", "the", "th", "a")
    assert [is_acceptable(text, ["the sea"]) for text in shown] == [False, True, True, True, False, False]


def test_passages_have_whole_words() -> None:
    passages = choose_passages({"f": TEXT}, 5, 4, random.Random(0))
    assert len(passages) == 5
    for passage in passages:
        typed = passage.text[passage.start : passage.end]
        assert len(typed.split()) == 4
        assert typed.endswith(" ")
        assert not typed.startswith(" ")
        assert TEXT[passage.start - 1] == " "


def test_a_context_is_trimmed_as_the_editor_does() -> None:
    """Its start is a multiple of 4,096 characters, so that consecutive requests share a prefix."""
    text = "".join(chr(ord("a") + at % 26) for at in range(20000))
    assert trim_context(text[:8192]) == text[:8192]
    assert trim_context(text[:12287]) == text[:12287]
    assert trim_context(text[:12288]) == text[4096:12288]
    assert trim_context(text) == text[8192:]
