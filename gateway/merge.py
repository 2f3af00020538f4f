"""Three completions become an answer: duplicates out, best first. Pure.

Score is the mean log-probability of a completion's kept tokens under the model's unmodified distribution,
so that completions of different length compare, and sampling settings do not flatter the unlikely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.schemas import BranchFailure, Done, Sentence


@dataclass(frozen=True, slots=True)
class BranchResult:
    """What one branch brought: its place in the request, who made it, and how long it took in seconds."""

    branch: int
    seed: int
    slot: int
    model: str
    done: Done
    time_s: float


@dataclass(frozen=True, slots=True)
class Merged:
    """`is_partial`: fewer branches than asked for, or one that was cut short by the time limit."""

    sentences: list[Sentence]
    failures: list[BranchFailure]
    is_partial: bool


def score(done: Done) -> float | None:
    """Mean log-probability of the tokens kept; None where none was."""
    kept = done.logprobs[: done.num_kept_tokens]
    return sum(kept) / len(kept) if kept else None


def merge(results: Sequence[BranchResult], failures: Sequence[BranchFailure]) -> Merged:
    """Rank what came back. A dropped duplicate does not make an answer partial; a missing branch does.

    A completion without text is worth showing only where there is no other (the model ended the text here), and
    nothing at all where it is empty because time ran out.
    """
    failed = list(failures)
    usable = []
    for result in results:
        if not result.done.text and result.done.finish_reason == "deadline":
            failed.append(_timed_out(result.branch))
        else:
            usable.append(result)
    if any(result.done.text for result in usable):
        usable = [result for result in usable if result.done.text]
    ranked = sorted((_sentence(result) for result in usable), key=_rank)
    seen: set[str] = set()
    sentences = []
    for sentence in ranked:
        if sentence.value not in seen:
            seen.add(sentence.value)
            sentences.append(sentence)
    is_partial = bool(failed) or any(sentence.finish_reason == "deadline" for sentence in sentences)
    return Merged(sentences, sorted(failed, key=lambda failure: failure.branch), is_partial)


def _timed_out(branch: int) -> BranchFailure:
    return BranchFailure(
        branch=branch, code="deadline_exceeded", detail="The time limit passed before its first token."
    )


def _rank(sentence: Sentence) -> tuple[float, int]:
    """Best score first; equal scores in seed order, so that a replay ranks alike."""
    return (-sentence.score if sentence.score is not None else float("inf"), sentence.seed)


def _sentence(result: BranchResult) -> Sentence:
    done = result.done
    return Sentence(
        value=done.text,
        time=round(result.time_s, 4),
        score=score(done),
        finish_reason=done.finish_reason,
        seed=result.seed,
        slot=result.slot,
        model=result.model,
        tokens=done.num_kept_tokens,
        cached_tokens=done.cached_tokens,
        queue_ms=round(done.queue_ms, 2),
        prefill_ms=round(done.prefill_ms, 2),
        decode_ms=round(done.decode_ms, 2),
    )
