"""Which completions become suggestions, and in which order: no loops, no near-duplicates, best score first. Pure.

Or every completion, as the model ended it, for a request that wants them unchanged.

A suggestion's score is the mean log-probability of its tokens under the model's unmodified distribution: completions of
different lengths compare, and sampling settings do not favour unlikely tokens. Ideas are ranked by what they owe to the
prompt (Li et al. 2016, arXiv 1510.03055), since what suits every text has a high score, too; fills of a gap by how well
they fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from msgspec import Struct, structs

from gateway.generation.request import (
    BranchEvent,
    BranchFailure,
    BranchOutcome,
    BranchResult,
    GenerationSpec,
    TokenDelta,
)
from gateway.generation.trimming import CHAT_VOICE, Trimmer, is_alike, rejection_reason, repeats_run
from shared.errors import DeadlineExceeded, InvalidRequest, NoCompletion, PromptTooLong, TercetError
from shared.protocol import Done
from shared.text import NOT_TEXT, expected_keys

# Share of the log-probability without the prompt that is subtracted from an idea's. Subtracting all favours what is
# odd: of 60 pairs of a good and a bad idea for one text, that orders 39 rightly, half of it 44, and the score alone 37.
PRIOR_WEIGHT = 0.5
# Codes of rejected completions.
REJECTION_DETAILS = {
    "duplicate": "It was the same as another.",
    "near_duplicate": "It was almost the same as another (TERCET_SIMILARITY).",
    "not_text": "It had bytes that are no character, or control characters.",
    "loop": "It repeated itself.",
    "repeats_context": "It only repeated the text before it.",
    "chat_voice": "It answered the writer instead of continuing the text.",
    "no_word": "It did not contain a whole word; allow a greater length.",
    "empty": "The model ended the text here.",
    "no_prediction": "There was no other word to predict.",
    "no_fit": "No beginning of it fits before the text after the cursor.",
    "unfamiliar_context": "The model does not know text like the end of the context (TERCET_MIN_FAMILIARITY).",
    "misspelled": "The word before it is misspelled.",
    "not_probable": "No word of it is as probable as min_probability.",
    "not_useful": "It would save too few keys (TERCET_MIN_USEFULNESS).",
}


class SelectionPolicy(Struct, frozen=True):
    """Rules for choosing suggestions.

    Attributes:
        prompt: the text that the completions continue.
        num_suggestions: suggestions wanted.
        length: requested tokens.
        similarity: percent from which two completions are near-duplicates, as in `trimming.is_alike`.
        keeps_greedy_text: keep loops, repetitions and a partial word: for greedy decoding, where the most likely text
            is what is wanted, as long as it is text.
        is_verbatim: every completion is a suggestion, with its text unchanged.
        fills_gap: the worker has cut each completion where it runs into the text after a gap; the best fit comes first.
        min_usefulness: completions are predictions, ranked by usefulness; those below this many keys are rejected, and
            none is replaced. None: they are samples.
        min_probability: predictions are cut after the last word that is this probable together with all before it;
            those without such a word are rejected, and none is replaced.
        is_idea: completions are ideas for a writer, which end with a sentence or clause and copy nothing.
        rejects_chat: reject those in which a chat model answers the writer, unless the prompt has such a voice.
        min_familiarity: if the prompt's score (`shared.protocol.Done.prompt_score`) is below it, all completions are
            rejected, and none is replaced. None: whatever the score.
    """

    prompt: str
    num_suggestions: int
    length: int
    similarity: float
    keeps_greedy_text: bool = False
    is_verbatim: bool = False
    fills_gap: bool = False
    min_usefulness: float | None = None
    min_probability: float = 0.0
    is_idea: bool = False
    rejects_chat: bool = False
    min_familiarity: float | None = None

    def trimmer(self) -> Trimmer:
        """A new trimmer of a completion."""
        return Trimmer(self.length, self.prompt, keeps_partial_word=self.keeps_greedy_text, is_idea=self.is_idea)


def selection_policy(spec: GenerationSpec, similarity: float, length: int | None = None) -> SelectionPolicy:
    """
    Args:
        similarity: percent from which two completions are near-duplicates.
        length: requested tokens; None: as many as are generated.
    """
    prompt = spec.prompts[0] if len(spec.prompts) == 1 else ""
    return SelectionPolicy(
        prompt=prompt if isinstance(prompt, str) else "",
        num_suggestions=spec.num_branches,
        length=spec.sampling.max_new_tokens if length is None else length,
        similarity=similarity,
        keeps_greedy_text=spec.sampling.temperature == 0,
        is_verbatim=not spec.heals,
        fills_gap=bool(spec.suffix),
    )


class Suggestion(Struct, frozen=True):
    """A completion that was selected.

    Attributes:
        text: trimmed.
        num_tokens: generated tokens that begin within `text`, without those that only repeat typed text (healing).
        score: mean log-probability of these tokens; None if there are none.
        gain: the score less `PRIOR_WEIGHT` of that without the prompt; None if that is not known.
        result: the completion as it came.
    """

    text: str
    num_tokens: int
    score: float | None
    gain: float | None
    result: BranchResult


class SelectionResult(Struct, frozen=True):
    """Suggestions, best first, and failures by branch: of branches, and of rejected completions without a replacement.

    `is_partial`: a branch failed, or a suggestion was cut short by the deadline.
    """

    suggestions: list[Suggestion]
    failures: list[BranchFailure]
    is_partial: bool


class Selection:
    """Judges completions in the order of their branches, whatever order they arrive in.

    The same completions give the same selection. Branches are numbered from 0 without gaps; those from
    `num_suggestions` on replace rejected completions.
    """

    def __init__(self, policy: SelectionPolicy) -> None:
        self._policy = policy
        self._pending: dict[int, BranchOutcome] = {}
        self._next_branch = 0
        self._selected: dict[int, Suggestion] = {}
        self._failures: list[BranchFailure] = []
        self._rejections: list[BranchFailure] = []
        self._empty: list[BranchResult] = []
        # Whether the model knows the prompt's language; None: not known yet.
        self.is_familiar: bool | None = True if policy.min_familiarity is None else None

    @property
    def num_missing(self) -> int:
        """Suggestions to be replaced: neither selected nor failed. There is one prediction of each rank."""
        if self._policy.min_usefulness is not None or self.is_familiar is False:
            return 0
        return self._policy.num_suggestions - len(self._selected) - len(self._failures)

    def note_score(self, event: BranchEvent) -> None:
        """Take the prompt's score from the first event of branch 0: its first token, or its outcome."""
        if self.is_familiar is not None or event.branch != 0:
            return
        score = None
        if isinstance(event, TokenDelta):
            score = event.tokens[0].prompt_score
        elif isinstance(event, BranchResult):
            score = event.done.prompt_score
        min_familiarity = self._policy.min_familiarity
        self.is_familiar = score is None or min_familiarity is None or score >= min_familiarity

    def add(self, outcome: BranchOutcome) -> list[Suggestion]:
        """Add a branch's outcome. Returns the suggestions that are selected by it, in the order of their branches."""
        self._pending[outcome.branch] = outcome
        selected = []
        while (branch := self._next_branch) in self._pending:
            self._next_branch += 1
            suggestion = self._judge(self._pending.pop(branch))
            if suggestion is not None:
                self._selected[branch] = suggestion
                selected.append(suggestion)
        return selected

    def result(self) -> SelectionResult:
        """Suggestions by score, equal scores by seed, so that a repeated request gets the same order.

        An empty completion (the model ended the text at once) is a suggestion only if there is no other.
        """
        suggestions = sorted(self._selected.values(), key=partial(_rank, fills_gap=self._policy.fills_gap))
        if self._policy.is_idea:
            if all(one.gain is not None for one in suggestions):
                suggestions.sort(key=lambda one: -(one.gain or 0.0))
            suggestions.sort(key=lambda one: one.text.startswith("\n"))  # a writer seldom wants another paragraph
        if not suggestions and self._empty:
            suggestions = [_suggestion(self._empty[0], "")]
        failures = list(self._failures)
        is_partial = bool(failures) or any(one.result.done.finish_reason == "deadline" for one in suggestions)
        num_unreplaced = self._policy.num_suggestions - len(suggestions) - len(failures)
        failures += self._rejections[len(self._rejections) - num_unreplaced :]
        return SelectionResult(suggestions, sorted(failures, key=lambda failure: failure.branch), is_partial)

    def _judge(self, outcome: BranchOutcome) -> Suggestion | None:
        self.note_score(outcome)
        if isinstance(outcome, BranchFailure):
            self._fail(outcome)
            return None
        if outcome.done.words and self._policy.min_probability:
            cut = cut_words(outcome.done, self._policy.min_probability, is_fill=self._policy.fills_gap)
            outcome = structs.replace(outcome, done=cut)
        text = trim_completion(outcome.done, self._policy)
        if not text and outcome.done.finish_reason == "deadline":
            self._fail(deadline_failure(outcome.branch))
            return None
        reason = "unfamiliar_context" if self.is_familiar is False else self._rejection_reason(text, outcome.done)
        if reason is None:
            return _suggestion(outcome, text)
        if reason == "empty":
            self._empty.append(outcome)
        self._rejections.append(BranchFailure(outcome.branch, reason, REJECTION_DETAILS[reason]))
        return None

    def _fail(self, failure: BranchFailure) -> None:
        # A failed replacement is not reported: the rejection that it should have replaced is.
        if failure.branch < self._policy.num_suggestions:
            self._failures.append(failure)

    def _rejection_reason(self, text: str, done: Done) -> str | None:
        if not self._policy.is_verbatim and NOT_TEXT.search(text):
            return "not_text"
        if done.replaces:
            return None if text else "misspelled"
        if self._policy.min_usefulness is not None:
            if not text:
                return "no_prediction" if done.words is None else "not_probable"
            return "not_useful" if (done.usefulness or 0.0) < self._policy.min_usefulness else None
        if self._policy.is_verbatim:
            return None
        if not text:
            if self._policy.fills_gap:
                return "no_fit"
            return "empty" if done.finish_reason in {"eos", "stop"} else "no_word"
        policy = self._policy
        if not policy.keeps_greedy_text and (reason := rejection_reason(text, policy.prompt)) is not None:
            return reason
        if policy.is_idea and repeats_run(text, policy.prompt):
            return "repeats_context"
        if policy.rejects_chat and CHAT_VOICE.search(text) and not CHAT_VOICE.search(policy.prompt):
            return "chat_voice"
        for other in self._selected.values():
            if text == other.text:
                return "duplicate"
            if not policy.fills_gap and is_alike(text, other.text, policy.similarity):
                return "near_duplicate"
        return None


def by_prompt(spec: GenerationSpec, suggestions: Iterable[Suggestion]) -> dict[int, list[Suggestion]]:
    """Group suggestions by their prompt's position, in the given order."""
    found: dict[int, list[Suggestion]] = defaultdict(list)
    for suggestion in suggestions:
        branch = suggestion.result.branch
        # A single prompt also has branches that replace others.
        found[branch // spec.num_completions if branch < spec.num_branches else 0].append(suggestion)
    return found


def deadline_failure(branch: int) -> BranchFailure:
    """The failure of a branch that has no whole word at the deadline."""
    return BranchFailure(branch, "deadline_exceeded", "The time limit passed before its first word.")


def cut_words(done: Done, min_probability: float, *, is_fill: bool = False) -> Done:
    """A prediction without the words that are less probable; its usefulness is that of the words that are left.

    A fill would not reach the text after the gap without its last words: it stays whole, or loses all of them.
    """
    words = [word for word in done.words or () if word.probability >= min_probability]
    if is_fill:
        if len(words) == len(done.words or ()):
            return done
        words = []
    end = words[-1].end if words else 0
    usefulness = round(expected_keys([word.end for word in words], [word.probability for word in words]), 3)
    ends = [min(each, end) for each in done.ends]
    return structs.replace(done, text=done.text[:end], ends=ends, words=words, usefulness=usefulness)


def trim_completion(done: Done, policy: SelectionPolicy) -> str:
    """A completion's text, trimmed by the policy's length, unless it is verbatim or the worker has trimmed it."""
    if policy.is_verbatim or policy.fills_gap or policy.min_usefulness is not None:
        return done.text
    return policy.trimmer().trim(done.text, done.ends[done.num_typed_tokens :], done.finish_reason)


def _suggestion(result: BranchResult, text: str) -> Suggestion:
    done = result.done
    if done.replaces:  # the tokens are those of the misspelled word
        return Suggestion(text, 0, None, None, result)
    begins = [0, *done.ends[done.num_typed_tokens : -1]]
    num_tokens = min(sum(begin < len(text) for begin in begins), done.num_kept_tokens - done.num_typed_tokens)
    own = slice(done.num_typed_tokens, done.num_typed_tokens + num_tokens)
    score, prior = _mean(done.logprobs[own]), _mean((done.prior_logprobs or [])[own])
    return Suggestion(
        text, num_tokens, score, None if score is None or prior is None else score - PRIOR_WEIGHT * prior, result
    )


def _mean(logprobs: list[float]) -> float | None:
    return sum(logprobs) / len(logprobs) if logprobs else None


def _rank(suggestion: Suggestion, *, fills_gap: bool) -> tuple[float, int]:
    if fills_gap:
        fit = suggestion.result.done.fit
        return (-fit if fit is not None else float("inf"), suggestion.result.branch)
    if suggestion.result.done.usefulness is not None:
        return (-suggestion.result.done.usefulness, suggestion.result.branch)
    return (-suggestion.score if suggestion.score is not None else float("inf"), suggestion.result.seed)


def are_rejections(failures: Sequence[BranchFailure]) -> bool:
    """Whether every branch had a completion, and all were rejected."""
    return all(failure.code in REJECTION_DETAILS for failure in failures)


def no_completion_error(failures: Sequence[BranchFailure], *, faster: str) -> TercetError:
    """The error of a request whose branches failed, or whose completions were rejected.

    Args:
        failures: the failures, at least one.
        faster: what to change so that a completion is ready in time, with the names of the dialect's fields.
    """
    codes = {failure.code for failure in failures}
    for refusal in (PromptTooLong, InvalidRequest):
        if codes == {refusal.code}:
            return refusal(failures[0].detail)  # the same for all: the worker refuses what its model cannot compute
    if codes == {DeadlineExceeded.code}:
        return DeadlineExceeded(f"No completion was ready in time; {faster}.")
    reasons = " ".join(sorted({f"{failure.code}: {failure.detail}" for failure in failures}))
    if are_rejections(failures):
        return NoCompletion(
            f"No completion was worth showing. {reasons} Try another seed, a higher temperature, or more context.",
        )
    return NoCompletion(f"Generation failed. {reasons} Try again.")
