"""Completions become an answer: clean ones, that differ, best first. Pure.

Score is the mean log-probability of a completion's kept tokens under the model's unmodified distribution,
so that completions of different length compare, and sampling settings do not flatter the unlikely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.api.schema import Sentence, TokenExplanation
from gateway.generation.trimming import clean, fault, is_alike
from shared.protocol import BranchFailure, Done

WHY_NOT = {
    "duplicate": "It was the same as another.",
    "near_duplicate": "It was almost the same as another (TERCET_SIMILARITY).",
    "loop": "It repeated itself.",
    "repeats_context": "It only said again what the context ends with.",
    "no_word": "Not one whole word came of it; allow a greater length.",
    "empty": "The model ended the text here.",
}


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
class SelectionPolicy:
    """What the request says of which completions to show.

    `is_literal`: the model's likeliest texts were asked for (temperature 0), even where they go round in circles.
    `similarity`: percent, as `cleaning.is_alike` has it.
    """

    context: str
    num_sentences: int
    length: int
    similarity: float
    is_literal: bool = False
    is_explained: bool = False


@dataclass(frozen=True, slots=True)
class Suggestions:
    """`is_partial`: a branch is missing that was not just dropped, or one was cut short by the time limit."""

    sentences: list[Sentence]
    failures: list[BranchFailure]
    is_partial: bool


class Selection:
    """Takes what the branches bring, in any order, and chooses in the order of their numbers: the same completions
    give the same choice, whenever they come. Branches are numbered from 0 without gaps; those after the first
    `num_sentences` are there to replace what was dropped."""

    def __init__(self, policy: SelectionPolicy) -> None:
        self._taste = policy
        self._heard: dict[int, BranchResult | BranchFailure] = {}
        self._next = 0
        self._chosen: dict[int, Sentence] = {}
        self._failures: list[BranchFailure] = []
        self._dropped: list[BranchFailure] = []
        self._ended: list[BranchResult] = []

    @property
    def num_missing(self) -> int:
        """Sentences still to be found, beside those whose branch failed."""
        return self._taste.num_sentences - len(self._chosen) - len(self._failures)

    def add(self, outcome: BranchResult | BranchFailure) -> list[tuple[int, Sentence]]:
        """The branches that are chosen now, and their sentences."""
        self._heard[outcome.branch] = outcome
        chosen = []
        while (number := self._next) in self._heard:
            self._next += 1
            sentence = self._judge(self._heard.pop(number))
            if sentence is not None:
                self._chosen[number] = sentence
                chosen.append((number, sentence))
        return chosen

    def merged(self) -> Suggestions:
        """The answer: best score first, equal ones in the order of their seeds, so that a replay ranks alike.

        A completion without text, where the model ended the text at once, is shown only where there is no other.
        """
        sentences = sorted(self._chosen.values(), key=_rank)
        if not sentences and self._ended:
            sentences = [_sentence(self._ended[0], "", self._taste)]
        failures = list(self._failures)
        is_partial = bool(failures) or any(sentence.finish_reason == "deadline" for sentence in sentences)
        num_unreplaced = self._taste.num_sentences - len(sentences) - len(failures)
        failures += self._dropped[len(self._dropped) - num_unreplaced :]
        return Suggestions(sentences, sorted(failures, key=lambda failure: failure.branch), is_partial)

    def _judge(self, outcome: BranchResult | BranchFailure) -> Sentence | None:
        if isinstance(outcome, BranchFailure):
            self._fail(outcome)
            return None
        done, policy = outcome.done, self._taste
        text = clean_text(done, policy)
        if not text and done.finish_reason == "deadline":
            self._fail(timed_out(outcome.branch))
            return None
        reason = self._why_not(text, done)
        if reason is not None:
            if reason == "empty":
                self._ended.append(outcome)
            self._dropped.append(BranchFailure(branch=outcome.branch, code=reason, detail=WHY_NOT[reason]))
            return None
        return _sentence(outcome, text, policy)

    def _fail(self, failure: BranchFailure) -> None:
        # What was to replace a dropped one is missed by nobody.
        if failure.branch < self._taste.num_sentences:
            self._failures.append(failure)

    def _why_not(self, text: str, done: Done) -> str | None:
        if not text:
            return "empty" if done.finish_reason in {"eos", "stop"} else "no_word"
        policy = self._taste
        if not policy.is_literal and (found := fault(text, policy.context)) is not None:
            return found
        for other in self._chosen.values():
            if text == other.value:
                return "duplicate"
            if is_alike(text, other.value, policy.similarity):
                return "near_duplicate"
        return None


def timed_out(branch: int) -> BranchFailure:
    return BranchFailure(branch=branch, code="deadline_exceeded", detail="The time limit passed before its first word.")


def clean_text(done: Done, policy: SelectionPolicy) -> str:
    """What the editor is shown of a completion."""
    ends = done.ends[done.num_typed_tokens :]
    return clean(done.text, ends, policy.length, done.finish_reason, is_literal=policy.is_literal)


def score(done: Done, num_tokens: int) -> float | None:
    """Mean log-probability of the first `num_tokens` that say something new; None of none."""
    kept = done.logprobs[done.num_typed_tokens :][:num_tokens]
    return sum(kept) / len(kept) if kept else None


def _num_tokens(done: Done, text: str) -> int:
    """How many tokens that say something new begin within the kept text."""
    begins = [0, *done.ends[done.num_typed_tokens : -1]]
    number = sum(begin < len(text) for begin in begins)
    return min(number, done.num_kept_tokens - done.num_typed_tokens)


def _rank(sentence: Sentence) -> tuple[float, int]:
    return (-sentence.score if sentence.score is not None else float("inf"), sentence.seed)


def _sentence(result: BranchResult, text: str, policy: SelectionPolicy) -> Sentence:
    done = result.done
    num_tokens = _num_tokens(done, text)
    return Sentence(
        value=text,
        time=round(result.time_s, 4),
        score=score(done, num_tokens),
        finish_reason=done.finish_reason,
        seed=result.seed,
        slot=result.slot,
        model=result.model,
        tokens=num_tokens,
        cached_tokens=done.cached_tokens,
        queue_ms=round(done.queue_ms, 2),
        prefill_ms=round(done.prefill_ms, 2),
        decode_ms=round(done.decode_ms, 2),
        explanation=_explanation(done, num_tokens) if policy.is_explained else None,
    )


def _explanation(done: Done, num_tokens: int) -> list[TokenExplanation]:
    own = slice(done.num_typed_tokens, done.num_typed_tokens + num_tokens)
    texts: Sequence[str] = (done.token_texts or [])[own]
    return [
        TokenExplanation(text=text, logprob=logprob, likeliest=[(top.text, top.logprob) for top in tops])
        for text, logprob, tops in zip(texts, done.logprobs[own], (done.tops or [])[own], strict=True)
    ]
