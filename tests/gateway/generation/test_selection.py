"""Selection: clean completions that differ, best score first, whatever order they arrive in."""

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from gateway.generation.request import BranchFailure, BranchOutcome, BranchResult
from gateway.generation.selection import Selection, SelectionPolicy, SelectionResult
from gateway.generation.trimming import is_alike
from shared.protocol import PredictedWord
from tests.gateway.generation.stubs import make_done, token_texts

POLICY = SelectionPolicy(prompt="He saw", num_suggestions=3, length=20, similarity=80)


def result(
    branch: int,
    token_texts: list[str],
    logprob: float = -1.0,
    *,
    kept: int | None = None,
    typed: int = 0,
    reason: str = "eos",
) -> BranchResult:
    done = make_done(
        token_texts,
        logprobs=[logprob - 0.1 * step for step in range(len(token_texts))],
        num_kept_tokens=len(token_texts) if kept is None else kept,
        num_typed_tokens=typed,
        finish_reason=reason,
    )
    return BranchResult(branch, 100 + branch, branch, "small", done, 0.01)


FAILURE = BranchFailure(2, "broken", "The call broke.")
A, B, C = (
    result(number, [text], logprob)
    for number, (text, logprob) in enumerate([(" the sea", -3), (" a gull", -1), (" nothing", -2)])
)


def select(*outcomes: BranchOutcome, policy: SelectionPolicy = POLICY) -> SelectionResult:
    selection = Selection(policy)
    for outcome in outcomes:
        selection.add(outcome)
    return selection.result()


def texts(answer: SelectionResult) -> list[str]:
    return [suggestion.text for suggestion in answer.suggestions]


def codes(answer: SelectionResult) -> list[str]:
    return [failure.code for failure in answer.failures]


def test_the_best_score_is_first() -> None:
    answer = select(A, B, C)
    assert [(s.text, s.score) for s in answer.suggestions] == [(" a gull", -1), (" nothing", -2), (" the sea", -3)]
    assert (answer.is_partial, answer.failures) == (False, [])


def test_equal_scores_are_ordered_by_seed() -> None:
    same_score = [result(branch, [text], -1) for branch, text in enumerate([" the sea", " a gull", " nothing"])]
    assert texts(select(*reversed(same_score))) == [" the sea", " a gull", " nothing"]


def test_a_rejected_duplicate_can_be_replaced_and_the_answer_is_not_partial() -> None:
    selection = Selection(POLICY)
    for outcome in (A, result(1, [" The sea."]), C):
        selection.add(outcome)
    assert selection.num_missing == 1
    answer = selection.result()
    assert codes(answer) == ["near_duplicate"]
    assert not answer.is_partial
    selection.add(result(3, [" a gull"]))
    assert selection.num_missing == 0
    assert (len(selection.result().suggestions), selection.result().failures) == (3, [])


def test_add_returns_what_it_selects_in_the_order_of_the_branches() -> None:
    selection = Selection(POLICY)
    assert selection.add(C) == []
    assert selection.add(B) == []
    assert [suggestion.result for suggestion in selection.add(A)] == [A, B, C]


# What a branch may end with, by its number.
OUTCOMES = st.lists(
    st.builds(
        lambda text, logprob, reason: lambda branch: result(branch, [text], logprob, reason=reason),
        st.sampled_from([" the sea", " the sea.", " the sea was", " a gull", " the the the", " nothing", " n", ""]),
        st.sampled_from([-1.0, -2.0]),
        st.sampled_from(["eos", "length", "deadline"]),
    )
    | st.just(lambda branch: BranchFailure(branch, "broken", "")),
    min_size=3,
    max_size=6,
).map(lambda ends: [end(branch) for branch, end in enumerate(ends)])


@given(OUTCOMES, st.randoms(use_true_random=False))
def test_suggestions_differ_in_any_order_of_arrival_and_every_missing_one_has_a_reason(
    outcomes: list[BranchOutcome], random: Random
) -> None:
    answer = select(*outcomes)
    assert not any(is_alike(a, b, POLICY.similarity) for a, b in combinations(texts(answer), 2))
    scores = [suggestion.score for suggestion in answer.suggestions]
    assert all(a is None or b is None or a >= b for a, b in combinations(scores, 2))
    assert len(answer.suggestions) + len(answer.failures) >= min(POLICY.num_suggestions, len(outcomes))
    assert [failure.branch for failure in answer.failures] == sorted(failure.branch for failure in answer.failures)
    assert all(failure.branch < POLICY.num_suggestions or failure.code != "broken" for failure in answer.failures)
    random.shuffle(outcomes)
    assert select(*outcomes) == answer


def test_the_failure_of_a_replacement_is_not_reported() -> None:
    late = BranchFailure(3, "deadline_exceeded", "Late.")
    answer = select(A, result(1, [" the sea"]), C, late)
    assert len(answer.suggestions) == 2
    assert codes(answer) == ["duplicate"]
    assert not answer.is_partial


def test_only_kept_tokens_that_are_not_typed_text_are_counted_and_scored() -> None:
    [stopped] = select(result(0, [" a", " b", " c"], kept=2, reason="stop")).suggestions
    assert (stopped.num_tokens, stopped.score) == (2, (-1.0 - 1.1) / 2)
    [healed] = select(result(0, ["", " b", " c"], typed=1)).suggestions
    assert (healed.num_tokens, healed.score) == (2, (-1.1 - 1.2) / 2)
    [trimmed] = select(result(0, [" one", " two", " three"], reason="length")).suggestions
    assert (trimmed.text, trimmed.num_tokens, trimmed.score) == (" one two", 2, (-1.0 - 1.1) / 2)


def test_a_completion_cut_by_the_deadline_is_partial_and_without_a_word_a_failure() -> None:
    answer = select(result(0, [" a", " gu"], reason="deadline"), result(1, [" g"], reason="deadline"), C)
    assert texts(answer) == [" a", " nothing"]
    assert answer.is_partial
    assert codes(answer) == ["deadline_exceeded"]


def test_an_empty_completion_is_suggested_only_if_there_is_no_other() -> None:
    ended = result(0, [""])
    assert texts(select(ended, B, C)) == [" a gull", " nothing"]
    [empty] = select(ended, result(1, [""]), result(2, [""])).suggestions
    assert (empty.text, empty.num_tokens, empty.score) == ("", 0, None)


def test_loops_and_repetitions_are_rejected_except_from_greedy_decoding() -> None:
    loop = result(0, [" the", " the", " the"])
    repetition = result(1, [" he", " saw", " it"])
    strict = replace(POLICY, num_suggestions=2)
    assert codes(select(loop, repetition, policy=strict)) == ["loop", "repeats_context"]
    assert select(loop, repetition, policy=strict).suggestions == []
    assert codes(select(result(0, [" unbeliev"], reason="length"), policy=strict)) == ["no_word"]
    greedy = replace(strict, keeps_greedy_text=True)
    assert texts(select(loop, repetition, policy=greedy)) == [" the the the", " he saw it"]
    assert texts(select(result(0, [" unbeliev"], reason="length"), policy=greedy)) == [" unbeliev"]


@pytest.mark.parametrize(
    ("text", "end", "expected"),
    [
        (" there: the Old man looked at the sea", "", ["repeats_context"]),
        (" there. The old man looked at her", "", []),  # five words
        ("\n\nI’d be happy to help with that.", "", ["chat_voice"]),
        (" left. I made a couple of minor tweaks to the text", "", ["chat_voice"]),
        (" left. I’d be happy to help.", ". Sure, I said. I", []),
    ],
)
def test_an_idea_copies_nothing_and_does_not_answer_the_writer(text: str, end: str, expected: list[str]) -> None:
    prompt = f"The old man looked at the sea, and wept. I was{end}"
    idea = replace(POLICY, prompt=prompt, num_suggestions=1, is_idea=True, rejects_chat=True)
    assert codes(select(result(0, token_texts(text)), policy=idea)) == expected
    assert codes(select(result(0, token_texts(text)), policy=replace(idea, is_idea=False, rejects_chat=False))) == []


def test_ideas_are_ordered_by_what_they_owe_to_the_prompt_if_it_is_known_of_all() -> None:
    idea = replace(POLICY, is_idea=True)
    known = [
        replace(one, done=structs.replace(one.done, prior_logprobs=[3 * one.done.logprobs[0]])) for one in (A, B, C)
    ]
    answer = select(*known, policy=idea)
    assert [(one.text, one.score, one.gain) for one in answer.suggestions] == [
        (" the sea", -3, 1.5),
        (" nothing", -2, 1),
        (" a gull", -1, 0.5),
    ]
    assert texts(select(*known[:2], C, policy=idea)) == texts(select(*known)) == texts(answer)[::-1]
    paragraph = replace(known[0], done=structs.replace(known[0].done, text="\nThe sea"))
    assert texts(select(paragraph, *known[1:], policy=idea)) == [" nothing", " a gull", "\nThe sea"]


def predicted(branch: int, text: str, usefulness: float) -> BranchResult:
    found = result(branch, [text] if text else [""])
    return replace(found, done=structs.replace(found.done, usefulness=usefulness))


def test_predictions_are_ranked_by_usefulness_and_never_replaced() -> None:
    policy = replace(POLICY, num_suggestions=4, min_usefulness=0.5)
    selection = Selection(policy)
    for outcome in (predicted(0, " sea", 0.9), predicted(1, " gull on", 2.5), predicted(2, " the the the", 0.4)):
        selection.add(outcome)
    selection.add(predicted(3, "", 0.0))
    assert selection.num_missing == 0
    answer = selection.result()
    assert texts(answer) == [" gull on", " sea"]
    assert codes(answer) == ["not_useful", "no_prediction"]
    assert not answer.is_partial


def test_predictions_are_cut_where_they_become_improbable() -> None:
    words = [PredictedWord(4, 0.8), PredictedWord(10, 0.5), PredictedWord(15, 0.2)]
    found = predicted(0, " sea looked like", 3.0)
    found = replace(found, done=structs.replace(found.done, words=words))
    rare = predicted(1, " gull", 0.4)
    rare = replace(rare, done=structs.replace(rare.done, words=[PredictedWord(5, 0.3)]))
    answer = select(found, rare, FAILURE, policy=replace(POLICY, min_usefulness=0.0, min_probability=0.5))
    [suggestion] = answer.suggestions
    assert (suggestion.text, suggestion.result.done.usefulness) == (" sea looke", round(0.8 * 4 + 0.5 * 6 - 0.8, 3))
    assert suggestion.result.done.words == words[:2]
    assert (codes(answer), answer.is_partial) == (["not_probable", "broken"], True)
    assert texts(select(found, policy=replace(POLICY, min_usefulness=0.0))) == [" sea looked like"]


def test_a_correction_is_shown_whatever_it_saves_unless_the_language_is_unknown() -> None:
    found = result(0, [" goverment"])
    found = replace(found, done=structs.replace(found.done, text="government", replaces=8, prompt_score=-3.0))
    strict = replace(POLICY, num_suggestions=1, min_usefulness=1.0, min_probability=0.5)
    [correction] = select(found, policy=strict).suggestions
    assert (correction.text, correction.score) == ("government", None)
    assert codes(select(found, policy=replace(strict, min_familiarity=-2.0))) == ["unfamiliar_context"]
    unclear = replace(found, done=structs.replace(found.done, text=""))
    assert codes(select(unclear, policy=strict)) == ["misspelled"]


# Bytes that no continuation makes text, control characters, and characters that stand for none.
NOT_TEXT = ["\ufffd", "\0", "\x07", "\x0b", "\x0c", "\x1b", "\x7f", "\x80", "\x85", "\x9f"]
NOT_TEXT += ["\ufdd0", "\ufff9", "\ufffc", "\ufffe", "\uffff", "\U0001ffff", "\U0010fffe"]
# Tabs and line ends; an emoji of two joined ones, one with a variation selector, a flag of tags; Persian and Sinhala
# with joiners; marks of direction; a soft hyphen; a letter with a combining mark; a private character (Apple's logo);
# other white space.
TEXT = [" a\tb\n\nc\r\nd", " 👩\u200d🚀", " ❤\ufe0f", " 🏴\U000e0067\U000e0062\U000e007f", " می\u200cخواهم"]
TEXT += [" ක්\u200dෂ", " \u200fא\u202bב\u202c\u2067ג\u2069", " Donau\xaddampf", " e\u0301", " \uf8ff"]
TEXT += ["\xa0\u2009\u2028\u3000\ufeffa", " “…”"]


@pytest.mark.parametrize("policy", [POLICY, replace(POLICY, keeps_greedy_text=True), replace(POLICY, fills_gap=True)])
def test_what_is_no_text_is_rejected_and_replaced(policy: SelectionPolicy) -> None:
    for character in NOT_TEXT:
        selection = Selection(policy)
        for outcome in (result(0, [f" the {character}sea"]), B, C):
            selection.add(outcome)
        assert selection.num_missing == 1
        assert (texts(selection.result()), codes(selection.result())) == ([" a gull", " nothing"], ["not_text"])


def test_what_is_no_text_is_no_prediction() -> None:
    answer = select(
        predicted(0, " s\ufffda", 0.9), predicted(1, " gull", 0.4), policy=replace(POLICY, min_usefulness=0.0)
    )
    assert (texts(answer), codes(answer)) == ([" gull"], ["not_text"])


def test_a_completion_that_is_wanted_unchanged_may_be_no_text() -> None:
    assert texts(select(result(0, [" \ufffd\0"]), policy=replace(POLICY, is_verbatim=True, num_suggestions=1))) == [
        " \ufffd\0"
    ]


@pytest.mark.parametrize("text", TEXT)
def test_what_people_write_is_text(text: str) -> None:
    assert texts(select(result(0, [text]), policy=replace(POLICY, num_suggestions=1))) == [text]


def test_what_is_trimmed_off_need_not_be_text() -> None:
    answer = select(
        result(0, [" the sea", " and the s", "\ufffd"], reason="length"), policy=replace(POLICY, num_suggestions=1)
    )
    assert texts(answer) == [" the sea"]


GUARDED = replace(POLICY, min_familiarity=-2.5)


def scored_result(branch: int, prompt_score: float | None, text: str = " the sea") -> BranchResult:
    scored = result(branch, [text])
    return replace(scored, done=structs.replace(scored.done, prompt_score=prompt_score))


@pytest.mark.parametrize("policy", [GUARDED, replace(GUARDED, is_verbatim=True), replace(GUARDED, min_usefulness=0.0)])
def test_a_prompt_that_the_model_does_not_know_gets_no_suggestion(policy: SelectionPolicy) -> None:
    """Whichever branch arrives first, and none is replaced: another would be no better."""
    selection = Selection(policy)
    for outcome in (result(1, [" a gull"]), C, scored_result(0, -2.6)):
        selection.add(outcome)
    assert selection.num_missing == 0
    answer = selection.result()
    assert answer.suggestions == []
    assert codes(answer) == ["unfamiliar_context"] * 3
    assert not answer.is_partial


@pytest.mark.parametrize("first", [scored_result(0, -2.5), scored_result(0, None), BranchFailure(0, "broken", "d")])
def test_a_prompt_that_the_model_knows_or_that_has_no_score_is_answered(first: BranchOutcome) -> None:
    assert {" a gull", " nothing"} <= set(texts(select(B, C, first, policy=GUARDED)))


def test_without_the_policy_a_score_decides_nothing() -> None:
    assert texts(select(scored_result(0, -40.0), B, C)) == [" the sea", " a gull", " nothing"]
