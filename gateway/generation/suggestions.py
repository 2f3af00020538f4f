"""Turns a started request into suggestions: text deltas, selected suggestions, and replacements for rejected ones.

The same events serve a streamed response and a whole one, completions that are cleaned and verbatim ones. Knows no
dialect.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from gateway.generation.fanout import Fanout
from gateway.generation.request import BranchFailure, BranchOutcome, BranchResult, RequestContext, TokenDelta
from gateway.generation.selection import (
    Selection,
    SelectionPolicy,
    SelectionResult,
    Suggestion,
    deadline_failure,
    trim_completion,
)
from shared.protocol import Token
from shared.text import NOT_TEXT

# Replacement branches per wanted suggestion: with more, a model that still repeats itself would keep doing so.
MAX_TOP_UPS = 2


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a branch, final: it is the continuation of the branch's text so far.

    `tokens` are those that it was made of, of a verbatim completion only; the last delta of a branch may have none.
    """

    branch: int
    text: str
    tokens: tuple[Token, ...] = ()


Output: TypeAlias = TextDelta | Suggestion | SelectionResult


class StartedRequest:
    """A request whose branches run. It is read once, by `result` or by `events`.

    Attributes:
        context: its spec, and its state while it is processed.
    """

    def __init__(self, context: RequestContext, fanout: Fanout, policy: SelectionPolicy) -> None:
        self.context = context
        self._fanout = fanout
        self._policy = policy

    def events(self) -> Iterator[Output]:
        """Events of a request whose first branches are started.

        Yields:
            Text deltas: a branch's deltas are a beginning of its suggestion's text. They wait until it is known whether
            the model knows the prompt's language, if the policy asks for that. Suggestions, as they are selected.
            `SelectionResult` last, at the deadline at the latest.

        Raises:
            TercetError: the reason of a cancellation.
        """
        context, policy = self.context, self._policy
        selection = Selection(policy)
        make_stream = _VerbatimStream if policy.is_verbatim else partial(_CleanedStream, policy)
        streams: defaultdict[int, _CleanedStream | _VerbatimStream] = defaultdict(make_stream)
        num_branches = policy.num_suggestions
        unfinished = set(range(num_branches))
        held: list[TextDelta] = []
        while unfinished and (event := context.next_event()) is not None:
            selection.note_score(event)
            if isinstance(event, TokenDelta):
                delta = streams[event.branch].feed(event)
            else:
                unfinished.remove(event.branch)
                if not unfinished and context.first_outcomes_at is None:
                    context.first_outcomes_at = time.monotonic()
                delta = None
                if isinstance(event, BranchResult) and context.spec.is_streamed:
                    event, text = streams[event.branch].finish(event)
                    delta = TextDelta(event.branch, text) if text else None
            if delta is not None:
                held.append(delta)
            if selection.is_familiar:
                yield from held
                held = []
            if isinstance(event, TokenDelta):
                continue
            yield from selection.add(event)
            num_missing = min(selection.num_missing, (1 + MAX_TOP_UPS) * policy.num_suggestions - num_branches)
            if not unfinished and num_missing > 0 and not context.is_over:
                replacements = range(num_branches, num_branches + num_missing)
                self._fanout.top_up(context, replacements)
                unfinished.update(replacements)
                num_branches += num_missing
                context.num_top_ups += num_missing
        context.cancel()
        if context.cancel_reason is not None:
            raise context.cancel_reason
        for branch in sorted(unfinished):
            yield from selection.add(deadline_failure(branch))
        yield selection.result()

    def result(self) -> SelectionResult:
        """Wait for the result, until the deadline at the latest.

        Raises:
            TercetError: the reason of a cancellation.
        """
        for event in self.events():
            if isinstance(event, SelectionResult):
                return event
        raise AssertionError("The result is the last event.")


class _CleanedStream:
    """The trimmed text of a branch that has been sent to the client."""

    def __init__(self, policy: SelectionPolicy) -> None:
        self._policy = policy
        self._attempt = 0
        self._trimmer = self._policy.trimmer()
        self._sent = ""

    def feed(self, delta: TokenDelta) -> TextDelta | None:
        """What to send after these tokens. A retry sends nothing until it is past what was sent before."""
        if delta.attempt != self._attempt:
            self._attempt = delta.attempt
            self._trimmer = self._policy.trimmer()
        for token in delta.tokens:
            self._trimmer.feed(token.text)
        text = self._advance(self._trimmer.text)
        return TextDelta(delta.branch, text) if text else None

    def finish(self, result: BranchResult) -> tuple[BranchOutcome, str]:
        """The branch's outcome, and the rest of its text to send.

        Sent text cannot be taken back: if a retry's text differs from it, the branch has failed. GPUs round differently
        in batches of different sizes, so a retry there may draw other tokens.
        """
        if result.done.replaces:  # text that continues nothing is no delta
            return result, ""
        text = trim_completion(result.done, self._policy)
        if not text.startswith(self._sent):
            return _diverged(result), ""
        return result, self._advance(text)

    def _advance(self, text: str) -> str:
        # What has characters that are none will be rejected.
        if not text.startswith(self._sent) or NOT_TEXT.search(text):
            return ""
        new = text[len(self._sent) :]
        self._sent = text
        return new


class _VerbatimStream:
    """The tokens of a branch that have been sent to the client."""

    def __init__(self) -> None:
        self._attempt = 0
        self._num_received = 0  # in this attempt
        self._sent_ids: list[int] = []
        self._sent_text = ""

    def feed(self, delta: TokenDelta) -> TextDelta | None:
        """As `_CleanedStream.feed`."""
        if delta.attempt != self._attempt:
            self._attempt, self._num_received = delta.attempt, 0
        num_known = max(0, len(self._sent_ids) - self._num_received)
        self._num_received += len(delta.tokens)
        tokens = delta.tokens[num_known:]
        if not tokens:
            return None
        text = "".join(token.text for token in tokens)
        self._sent_ids += [token.token_id for token in tokens]
        self._sent_text += text
        return TextDelta(delta.branch, text, tokens)

    def finish(self, result: BranchResult) -> tuple[BranchOutcome, str]:
        """As `_CleanedStream.finish`. The rest is text that was held back: it could have become a stop string."""
        done = result.done
        if done.token_ids[: len(self._sent_ids)] != self._sent_ids or not done.text.startswith(self._sent_text):
            return _diverged(result), ""
        return result, done.text[len(self._sent_text) :]


def _diverged(result: BranchResult) -> BranchFailure:
    return BranchFailure(result.branch, "diverged", "Its retry gave a different text.")
