"""Merging is pure: duplicates out, best first, one good branch is enough."""

from gateway.merge import BranchResult, merge
from shared.schemas import BranchFailure, Done


def result(
    branch: int, text: str, logprobs: list[float], *, kept: int | None = None, reason: str = "length"
) -> BranchResult:
    done = Done(
        text=text,
        token_ids=list(range(len(logprobs))),
        logprobs=logprobs,
        num_kept_tokens=len(logprobs) if kept is None else kept,
        finish_reason=reason,
        num_prompt_tokens=4,
        cached_tokens=0,
        queue_ms=0.0,
        prefill_ms=1.0,
        decode_ms=2.0,
    )
    return BranchResult(branch, 100 + branch, branch, "small", done, 0.01)


FAILURE = BranchFailure(branch=2, code="broken", detail="The call broke.")


def test_best_score_first() -> None:
    merged = merge([result(0, " a", [-3.0]), result(1, " b", [-1.0, -1.5]), result(2, " c", [-2.0])], [])
    assert [(s.value, s.score) for s in merged.sentences] == [(" b", -1.25), (" c", -2.0), (" a", -3.0)]
    assert not merged.is_partial


def test_exact_duplicates_go_and_do_not_make_it_partial() -> None:
    merged = merge([result(0, " a", [-3.0]), result(1, " a", [-1.0]), result(2, " b", [-2.0])], [])
    assert [(s.value, s.seed) for s in merged.sentences] == [(" a", 101), (" b", 102)]
    assert not merged.is_partial


def test_one_good_branch_is_enough() -> None:
    merged = merge([result(0, " a", [-3.0])], [FAILURE])
    assert [s.value for s in merged.sentences] == [" a"]
    assert merged.is_partial
    assert merged.failures == [FAILURE]


def test_only_kept_tokens_count_in_the_score() -> None:
    merged = merge([result(0, " a", [-1.0, -9.0], kept=1, reason="stop")], [])
    assert (merged.sentences[0].score, merged.sentences[0].tokens) == (-1.0, 1)


def test_cut_by_the_deadline_is_partial_and_empty_by_it_is_a_failure() -> None:
    merged = merge([result(0, " a", [-1.0], reason="deadline"), result(1, "", [], reason="deadline")], [])
    assert [s.value for s in merged.sentences] == [" a"]
    assert merged.is_partial
    assert [failure.code for failure in merged.failures] == ["deadline_exceeded"]


def test_an_empty_completion_is_shown_only_where_there_is_no_other() -> None:
    ended = result(0, "", [], reason="eos")
    assert [s.value for s in merge([ended, result(1, " a", [-9.0])], []).sentences] == [" a"]
    assert [s.value for s in merge([ended, result(1, "", [], reason="eos")], []).sentences] == [""]


def test_nothing_came_back() -> None:
    merged = merge([], [FAILURE])
    assert merged.sentences == []
    assert merged.is_partial
