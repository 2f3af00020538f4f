"""When suggestions are requested, what is sent, and what of an answer still holds."""

from __future__ import annotations

import pytest

from deploy.clients.lsp.suggestions import (
    MAX_CONTEXT_CHARS,
    Answer,
    Caret,
    EditorSettings,
    Sentence,
    Suggestions,
    Trigger,
    read_settings,
)

LIVE = EditorSettings()
OFF = EditorSettings(mode="off")
CODE = Caret.of("```\nThe se", "", is_markdown=True)


def caret(context: str, after: str = "") -> Caret:
    return Caret.of(context, after)


def test_keys_are_answered_with_words_and_a_wish_with_ideas() -> None:
    suggestions = Suggestions()
    assert suggestions.session != Suggestions().session  # each document has its own
    typed = suggestions.request(caret("The se"), Trigger.TYPED, LIVE)
    own = {"context": "The se", "session": suggestions.session, "sequence": 1, "familiar_only": True}
    assert typed == own | {"strategy": "predict", "min_probability": 0.5}
    asked = suggestions.request(caret("The se"), Trigger.ASKED, LIVE)
    ideas = own | {"strategy": "idea"}
    assert asked == ideas | {"sequence": 2}
    assert suggestions.request(caret("The se"), Trigger.LISTED, LIVE) == typed | {"sequence": 3}
    pauses = EditorSettings(mode="pauses", model="small")
    wanted = ideas | {"model_size": "small", "sequence": 4}
    assert suggestions.request(caret("The sea"), Trigger.TYPED, pauses) == wanted | {"context": "The sea"}


@pytest.mark.parametrize(
    ("before", "now", "trigger", "settings", "is_requested"),
    [
        ("The sea", caret("The se"), Trigger.TYPED, LIVE, False),  # a deletion
        ("The sea", caret("The se"), Trigger.ASKED, LIVE, True),
        ("The sea", caret("The se"), Trigger.LISTED, LIVE, True),
        ("", caret("The se", " was calm"), Trigger.TYPED, LIVE, False),  # text follows on the line
        ("", caret("The se", "  "), Trigger.TYPED, LIVE, True),
        ("", caret("(“The se", "**”), "), Trigger.TYPED, LIVE, True),  # marks that editors close by themselves
        ("", caret("(The se", ") was"), Trigger.TYPED, LIVE, False),
        ("", CODE, Trigger.TYPED, LIVE, False),
        ("", CODE, Trigger.LISTED, LIVE, False),
        ("", CODE, Trigger.ASKED, LIVE, True),
        ("", CODE, Trigger.TYPED, EditorSettings(prose_only=False), True),
        ("", caret("The se"), Trigger.TYPED, OFF, False),
        ("", caret("The se"), Trigger.LISTED, OFF, False),
        ("", caret("The se"), Trigger.ASKED, OFF, True),
        ("", caret(" \n"), Trigger.ASKED, LIVE, False),  # nothing to continue
    ],
)
def test_what_is_requested(
    before: str, now: Caret, trigger: Trigger, settings: EditorSettings, is_requested: bool
) -> None:
    suggestions = Suggestions()
    suggestions.request(caret(before), trigger, settings)
    assert (suggestions.request(now, trigger, settings) is not None) == is_requested


def test_before_text_on_the_line_the_gap_is_filled() -> None:
    found = Suggestions().request(caret("The sea was ", "and calm\r\n"), Trigger.ASKED, LIVE)
    assert found is not None
    assert (found["suffix"], found["strategy"]) == ("and calm", "predict")
    found = Suggestions().request(caret("“*The sea", "*.”"), Trigger.ASKED, LIVE)
    assert found is not None
    assert (found["suffix"], found["strategy"]) == (".”", "idea")


def test_what_agrees_with_the_typed_text_stays() -> None:
    suggestions = Suggestions()
    assert suggestions.offers(caret("The"), 0) == []
    sentences = [Sentence(" sea was", 2.0), Sentence(" ship", 1.0), Sentence(" sea", 0.5)]
    suggestions.answered(caret("The"), Answer("a", sentences))
    assert [offer.text for offer in suggestions.offers(caret("The"), 0)] == [" sea was", " ship", " sea"]
    assert [(offer.text, offer.index) for offer in suggestions.offers(caret("The s"), 0)] == [
        ("ea was", 0),
        ("hip", 1),
        ("ea", 2),
    ]
    assert [offer.text for offer in suggestions.offers(caret("The sea"), 0)] == [" was"]
    assert [offer.text for offer in suggestions.offers(caret("The"), 1)] == [" sea was", " ship"]
    for other in (caret("The m"), caret("Th"), caret("The sea was"), caret("The", "!")):
        assert suggestions.offers(other, 0) == []
    suggestions.answered(caret("The"), Answer("a", [Sentence(" sea", 0.5), Sentence(" an idea")]))
    assert [offer.text for offer in suggestions.offers(caret("The"), 1.5)] == [" an idea"]
    suggestions.forget()
    assert suggestions.offers(caret("The"), 0) == []


def test_a_long_text_is_cut_in_steps_and_sent_as_it_can_be_encoded() -> None:
    text = "x" * 100_000
    sizes = {len(caret(text[:size]).context) for size in range(50_000, 50_200)}
    assert min(sizes) >= MAX_CONTEXT_CHARS
    starts = {size - len(caret(text[:size]).context) for size in range(50_000, 50_200)}
    assert len(starts) == 1
    assert len(caret("", "y" * 1000).after) == 200
    found = caret("one\r\ntwo \ud83d three", "\udc00")  # halves of surrogate pairs cannot be encoded
    assert (found.context, found.after) == ("one\ntwo ? three", "?")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("at the se", "se"),
        ("at the ", ""),
        ("I don't", "don't"),
        ("“Caf\u00e9", "Café"),
        ("well-kn", "well-kn"),
        ("end.", ""),
        ("'", ""),
        ("the '90s", "90s"),
    ],
)
def test_the_word_before_the_caret(text: str, word: str) -> None:
    assert caret(text).word == word


def test_settings_of_an_editor() -> None:
    found = read_settings({"mode": "pauses", "key": None}, None, {"minUsefulness": 1, "mode": "off"})
    assert found == EditorSettings(mode="off", min_usefulness=1)
    for wrong in ({"modes": "live"}, {"mode": "always"}, {"url": 8000}, {"minUsefulness": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            read_settings(wrong)
