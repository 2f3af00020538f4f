"""From a request's first branches to its answer: pieces of text as they come, sentences as they are chosen, and
others in place of those that are dropped, while time remains.

Answering at once and streaming are the same here; who asked for what is `gateway.resources`' business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gateway.api.schema import Sentence
from gateway.generation.fanout import BranchSpec, Fanout, RequestContext, TextDelta
from gateway.generation.selection import BranchResult, Selection, SelectionPolicy, Suggestions, clean_text, timed_out
from gateway.generation.trimming import Trimmer
from shared.protocol import BranchFailure

# Branches in place of dropped ones, for each sentence asked for: where a model has so little to say, more of
# them would be the same again.
MAX_TOP_UPS = 2


@dataclass(frozen=True, slots=True)
class SelectedSentence:
    """A branch's completion is whole, clean and unlike the others."""

    branch: int
    sentence: Sentence


def suggest(
    run: RequestContext, fanout: Fanout, policy: SelectionPolicy, make_branch: Callable[[int], BranchSpec]
) -> Iterator[TextDelta | SelectedSentence | Suggestions]:
    """What comes of a run whose first branches are under way; `Suggestions` is the last.

    Args:
        make_branch: a branch by its number.

    Raises:
        TercetError: why the run was ended from outside.
    """
    selection = Selection(policy)
    lines: dict[int, _Line] = {}
    num_branches = policy.num_sentences
    awaited = set(range(num_branches))
    while awaited and (heard := run.next()) is not None:
        if isinstance(heard, TextDelta):
            line = lines.setdefault(heard.branch, _Line(policy))
            if text := line.feed(heard):
                yield TextDelta(heard.branch, (text,))
            continue
        awaited.remove(heard.branch)
        if not awaited and run.heard_first_at is None:
            run.heard_first_at = time.monotonic()
        if isinstance(heard, BranchResult) and heard.branch in lines:
            line = lines[heard.branch]
            heard, rest = line.finish(heard)
            if rest:
                yield TextDelta(heard.branch, (rest,))
        for number, sentence in selection.add(heard):
            yield SelectedSentence(number, sentence)
        num_missing = min(selection.num_missing, (1 + MAX_TOP_UPS) * policy.num_sentences - num_branches)
        if not awaited and num_missing > 0 and not run.is_over:
            awaited = set(range(num_branches, num_branches + num_missing))
            fanout.top_up(run, [make_branch(number) for number in sorted(awaited)])
            num_branches += num_missing
            run.num_top_ups += num_missing
    run.cancel()
    if run.ended_by is not None:
        raise run.ended_by
    for number in sorted(awaited):
        for branch, sentence in selection.add(timed_out(number)):
            yield SelectedSentence(branch, sentence)
    yield selection.merged()


class _Line:
    """What a reader has been sent of one branch."""

    __slots__ = ("_attempt", "_cleaner", "_sent", "_taste")

    def __init__(self, policy: SelectionPolicy) -> None:
        self._taste = policy
        self._attempt = 0
        self._cleaner = self._new_cleaner()
        self._sent = ""

    def feed(self, piece: TextDelta) -> str:
        """The text to send, now that `piece` has come."""
        if piece.attempt != self._attempt:  # begun anew, on another slot
            self._attempt = piece.attempt
            self._cleaner = self._new_cleaner()
        for text in piece.texts:
            self._cleaner.feed(text)
        return self._advance(self._cleaner.text)

    def finish(self, result: BranchResult) -> tuple[BranchResult | BranchFailure, str]:
        """The result, and what is still to be sent of it.

        Where another slot went on otherwise (a GPU may, within its rounding), what was sent cannot be taken back:
        the branch has failed.
        """
        text = clean_text(result.done, self._taste)
        if not text.startswith(self._sent):
            return BranchFailure(branch=result.branch, code="diverged", detail="Its second try went another way."), ""
        return result, self._advance(text)

    def _new_cleaner(self) -> Trimmer:
        return Trimmer(self._taste.length, is_literal=self._taste.is_literal)

    def _advance(self, text: str) -> str:
        if not text.startswith(self._sent):
            return ""
        new = text[len(self._sent) :]
        self._sent = text
        return new
