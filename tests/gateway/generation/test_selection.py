"""Choosing is pure: clean completions that differ, best first, whenever they come."""

from itertools import accumulate, permutations

from gateway.generation.selection import BranchResult, Selection, SelectionPolicy, Suggestions
from shared.protocol import BranchFailure, Done, Top

TASTE = SelectionPolicy(context="He saw", num_sentences=3, length=20, similarity=80)


def result(
    branch: int, pieces: list[str], logprob: float = -1.0, *, kept: int | None = None, typed: int = 0,
    reason: str = "eos",
) -> BranchResult:  # fmt: skip
    done = Done(
        text="".join(pieces),
        token_ids=list(range(len(pieces))),
        logprobs=[logprob - 0.1 * number for number in range(len(pieces))],
        ends=list(accumulate(map(len, pieces))),
        num_kept_tokens=len(pieces) if kept is None else kept,
        num_typed_tokens=typed,
        finish_reason=reason,
        num_prompt_tokens=4,
        cached_tokens=0,
        queue_ms=0.0,
        prefill_ms=1.0,
        decode_ms=2.0,
    )
    return BranchResult(branch, 100 + branch, branch, "small", done, 0.01)


FAILURE = BranchFailure(branch=2, code="broken", detail="The call broke.")
A, B, C = (
    result(number, [text], logprob)
    for number, (text, logprob) in enumerate([(" the sea", -3), (" a gull", -1), (" nothing", -2)])
)


def merged(*outcomes: BranchResult | BranchFailure, policy: SelectionPolicy = TASTE) -> Suggestions:
    selection = Selection(policy)
    for outcome in outcomes:
        selection.add(outcome)
    return selection.merged()


def values(answer: Suggestions) -> list[str]:
    return [sentence.value for sentence in answer.sentences]


def test_best_score_first() -> None:
    answer = merged(A, B, C)
    assert [(s.value, s.score) for s in answer.sentences] == [(" a gull", -1), (" nothing", -2), (" the sea", -3)]
    assert (answer.is_partial, answer.failures) == (False, [])


def test_a_duplicate_makes_room_for_another_and_no_partial_answer() -> None:
    selection = Selection(TASTE)
    for outcome in (A, result(1, [" The sea."]), C):
        selection.add(outcome)
    assert selection.num_missing == 1
    answer = selection.merged()
    assert [failure.code for failure in answer.failures] == ["near_duplicate"]
    assert not answer.is_partial
    selection.add(result(3, [" a gull"]))
    assert selection.num_missing == 0
    assert (len(selection.merged().sentences), selection.merged().failures) == (3, [])


def test_the_choice_does_not_depend_on_who_comes_first() -> None:
    outcomes = [A, result(1, [" the sea"], -0.5), result(2, [" the sea", "."]), result(3, [" a gull"])]
    answers = [merged(*order) for order in permutations(outcomes)]
    assert all(answer == answers[0] for answer in answers)
    assert values(answers[0]) == [" a gull", " the sea"]


def test_what_was_to_replace_another_and_failed_is_no_failure() -> None:
    late = BranchFailure(branch=3, code="deadline_exceeded", detail="Late.")
    answer = merged(A, result(1, [" the sea"]), C, late)
    assert len(answer.sentences) == 2
    assert [failure.code for failure in answer.failures] == ["duplicate"]
    assert not answer.is_partial


def test_one_good_branch_is_enough() -> None:
    answer = merged(A, BranchFailure(branch=1, code="broken", detail=""), FAILURE)
    assert values(answer) == [" the sea"]
    assert answer.is_partial
    assert [failure.branch for failure in answer.failures] == [1, 2]


def test_only_kept_tokens_that_say_something_new_count() -> None:
    stopped = result(0, [" a", " b", " c"], kept=2, reason="stop")
    assert (stopped.done.logprobs[:2], merged(stopped).sentences[0].tokens) == ([-1.0, -1.1], 2)
    assert merged(stopped).sentences[0].score == -1.05
    healed = result(0, ["", " b", " c"], typed=1)
    assert (merged(healed).sentences[0].tokens, round(merged(healed).sentences[0].score or 0, 9)) == (2, -1.15)
    cut = result(0, [" one", " two", " three"], reason="length")
    assert (merged(cut).sentences[0].value, merged(cut).sentences[0].tokens) == (" one two", 2)


def test_cut_by_the_deadline_is_partial_and_empty_by_it_is_a_failure() -> None:
    answer = merged(result(0, [" a", " gu"], reason="deadline"), result(1, [" g"], reason="deadline"), C)
    assert values(answer) == [" a", " nothing"]
    assert answer.is_partial
    assert [failure.code for failure in answer.failures] == ["deadline_exceeded"]


def test_an_empty_completion_is_shown_only_where_there_is_no_other() -> None:
    ended = result(0, [""])
    assert values(merged(ended, B, C)) == [" a gull", " nothing"]
    assert values(merged(ended, result(1, [""]), result(2, [""]))) == [""]


def test_loops_are_dropped_unless_the_likeliest_texts_were_asked_for() -> None:
    loop = result(0, [" the", " the", " the"])
    assert [failure.code for failure in merged(loop).failures] == ["loop"]
    assert merged(loop).sentences == []
    literal = SelectionPolicy(context="He saw", num_sentences=1, length=20, similarity=80, is_literal=True)
    assert values(merged(loop, policy=literal)) == [" the the the"]


def test_an_explanation_covers_what_is_kept() -> None:
    done = result(0, ["", " a", " gull", " fl"], typed=1, reason="length").done
    done.token_texts = [" saw", " a", " gull", " fl"]
    done.tops = [[Top(1, text, -0.5)] for text in done.token_texts]
    policy = SelectionPolicy(context="He saw", num_sentences=1, length=20, similarity=80, is_explained=True)
    [sentence] = merged(BranchResult(0, 0, 0, "small", done, 0.1), policy=policy).sentences
    assert [(one.text, one.likeliest) for one in sentence.explanation or []] == [
        (" a", [(" a", -0.5)]), (" gull", [(" gull", -0.5)]),
    ]  # fmt: skip


def test_nothing_came_back() -> None:
    answer = merged(*(BranchFailure(branch=number, code="broken", detail="") for number in range(3)))
    assert answer.sentences == []
    assert answer.is_partial
