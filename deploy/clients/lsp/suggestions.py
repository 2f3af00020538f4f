"""The suggestions for one document: what a user can set, when to request some, what to request, and what of an answer
still holds.

Pure state. It knows neither the editor's protocol nor HTTP.
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any, Literal

import msgspec

from deploy.clients.lsp.text import has_text_after, is_prose, trim_suffix

# The server reads the last few hundred tokens only. The start of what is sent moves in steps, so that consecutive
# requests share a prefix and the server's prefix cache hits.
MAX_CONTEXT_CHARS = 8192
CUT_STEP_CHARS = 4096
MAX_SUFFIX_CHARS = 200  # the server reads no more
_LINE_END = re.compile(r"\r\n?|\n")
_WORD = re.compile(r"\w[\w'’-]*\Z")
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class EditorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """What a user can set in the editor, in the section `tercet` of its settings.

    Attributes:
        url: the server's address; empty: the one of the command line or of this machine.
        key: its API key; empty: none, or `TERCET_API_KEY` where `url` is empty too.
        mode: when suggestions come unasked. `live`: likely next words at every key; `pauses`: ideas when typing
            pauses; `off`: never.
        min_probability: in the mode `live`, predictions end where they are less probable.
        min_usefulness: in the mode `live`, predictions that are expected to save fewer keys are held back.
        prose_only: nothing comes unasked in code, front matter and mathematics of Markdown and plain text.
        model: the name of a model that the server serves; empty: its default.
    """

    url: str = ""
    key: str = ""
    mode: Literal["live", "pauses", "off"] = "live"
    min_probability: Probability = 0.5
    min_usefulness: NonNegative = 1
    prose_only: bool = True
    model: str = ""


def read_settings(*sections: Any) -> EditorSettings:
    """The settings in these sections, of which a later one wins. An editor may send null for what is not set.

    Raises:
        ValueError: a setting has an unknown name, or a value that it cannot have.
    """
    merged: dict[str, Any] = {}
    for section in sections:
        if isinstance(section, dict):
            merged |= {name: value for name, value in section.items() if value is not None}
    return msgspec.convert(merged, EditorSettings)


class Trigger(Enum):
    """Why the editor asks: a key was typed, the writer asked for inline suggestions, or a list is open or opens.

    Editors open a list when they like, and do not say whether the writer asked for it.
    """

    TYPED = auto()
    ASKED = auto()
    LISTED = auto()


class Sentence(msgspec.Struct, frozen=True):
    """One suggestion of the server. `usefulness`: the keys that it should save; of predictions only."""

    value: str
    usefulness: float = math.inf


class Answer(msgspec.Struct, frozen=True):
    """What the server answers to `POST /autocomplete`."""

    id: str
    sentences: list[Sentence]


@dataclass(frozen=True, slots=True)
class Caret:
    """The text around the caret: that before it, cut, with lines that end in "\\n"; the rest of its line; how the
    document's lines end there; and whether that is prose."""

    context: str
    after: str
    line_end: str = "\n"
    is_prose: bool = True

    @classmethod
    def of(cls, before: str, after: str, *, is_markdown: bool = False) -> Caret:
        """
        Args:
            before: all of the document before the caret.
            after: the rest of the line, with its end.
        """
        start = max(0, (len(before) - MAX_CONTEXT_CHARS) // CUT_STEP_CHARS * CUT_STEP_CHARS)
        lines = _LINE_END.findall(before) or _LINE_END.findall(after) or ["\n"]
        context = _LINE_END.sub("\n", before[start:])
        suffix = _valid(after.rstrip("\r\n")[:MAX_SUFFIX_CHARS])
        return cls(_valid(context), suffix, lines[-1], not is_markdown or is_prose(before))

    def as_in_document(self, text: str) -> str:
        """A text to insert, with the line ends of the document."""
        return _LINE_END.sub(lambda _: self.line_end, text)

    @property
    def word(self) -> str:
        """The part of a word before the caret, or the word that ends there; empty if there is none."""
        found = _WORD.search(self.context[-100:])
        return found[0] if found else ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A suggestion as it is offered: the text to insert at the caret, and the sentence that it is the rest of."""

    text: str
    answer_id: str
    index: int


class Suggestions:
    """The suggestions for one document.

    Attributes:
        session: the document's session: the server cancels a request when a newer one of its session arrives.
        num_requests: how often the editor asked.
    """

    def __init__(self) -> None:
        self.session = secrets.token_hex(8)
        self.num_requests = 0
        self._last = Caret("", "")
        self._answered: tuple[Caret, Answer] | None = None

    def request(self, caret: Caret, trigger: Trigger, settings: EditorSettings) -> dict[str, Any] | None:
        """The body of the request to send for this caret; None: nothing is to be requested here."""
        self.num_requests += 1
        is_deletion = caret.context != self._last.context and self._last.context.startswith(caret.context)
        self._last = caret
        is_before_text = has_text_after(caret.after)
        is_unwanted = settings.mode == "off" or (settings.prose_only and not caret.is_prose)
        if not caret.context.strip() or (is_unwanted and trigger is not Trigger.ASKED):
            return None
        if trigger is Trigger.TYPED and (is_before_text or is_deletion):
            return None
        is_idea = not is_before_text and (trigger is Trigger.ASKED or settings.mode == "pauses")
        # By its number the server knows the newest; requests go by several connections, and overtake each other.
        body: dict[str, Any] = {"context": caret.context, "session": self.session, "sequence": self.num_requests}
        body["familiar_only"] = True
        body["strategy"] = "idea" if is_idea else "predict"
        if trigger is not Trigger.ASKED and not is_idea:
            body["min_probability"] = settings.min_probability
        if suffix := trim_suffix(caret.after):
            body["suffix"] = suffix
        if settings.model:
            body["model_size"] = settings.model
        return body

    def answered(self, caret: Caret, answer: Answer) -> None:
        self._answered = (caret, answer)

    def forget(self) -> None:
        """Offer nothing of the last answer again."""
        self._answered = None

    def offers(self, caret: Caret, min_usefulness: float) -> list[Offer]:
        """What of the last answer agrees with the text that was typed since, and extends it."""
        if self._answered is None:
            return []
        asked, answer = self._answered
        if asked.after != caret.after or not caret.context.startswith(asked.context):
            return []
        typed = caret.context[len(asked.context) :]
        return [
            Offer(sentence.value.removeprefix(typed), answer.id, index)
            for index, sentence in enumerate(answer.sentences)
            if sentence.usefulness >= min_usefulness and sentence.value.startswith(typed) and sentence.value != typed
        ]


def _valid(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can name and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
