"""`tercet bench moments`: what a live writer would see at random moments, for a person to read.

Random positions in prose unknown to the model, in words and between them, as they come; the context, the predictions in
their order with their usefulness, and the text that follows. Through the real gateway, which holds nothing back:
a threshold is applied here, so that what it hides can be read as well.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec
from rich.console import Console

from deploy.bench.quality.writers import matching_length
from deploy.load.options import Options
from deploy.load.passages import trim_context
from deploy.load.report import Document
from deploy.load.run import progress, start_server
from shared.errors import StartError

MIN_CONTEXT_CHARS = 300
SHOWN_CONTEXT_CHARS = 60
FOLLOWING_CHARS = 40
_MARKUP = re.compile(r"([|*_`<\[\]\\])")


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A position in a text; `suggestions` are (text, usefulness in keys), best first.

    `is_shown`: the best is at least as useful as the threshold.
    """

    file: str
    context: str  # its end
    following: str  # the beginning of what the author wrote
    suggestions: list[tuple[str, float]]
    is_shown: bool

    @property
    def has_right_word(self) -> bool:
        """Whether a suggestion begins with the author's next word, or its rest."""
        return any(matching_length(text, self.following) for text, _ in self.suggestions)


class MomentsBench:
    """One run. `run` fills the document."""

    def __init__(
        self, options: Options, texts: Mapping[str, str], fields: Mapping[str, Any], console: Console, *,
        num_moments: int, min_usefulness: float,
    ) -> None:  # fmt: skip
        """
        Args:
            texts: unknown to the model, by file name.
            fields: of each request, as in `POST /autocomplete`.
            min_usefulness: keys that the best suggestion should save, to be shown.
        """
        self._options, self._texts, self._console = options, texts, console
        self._fields = {**fields, "strategy": "predict"}
        self._num_moments, self._min_usefulness = num_moments, min_usefulness

    def run(self, document: Document) -> None:
        """
        Raises:
            StartError: a request failed.
        """
        document.workload = {"fields": self._fields, "min_usefulness": self._min_usefulness}
        settings = {**self._options.server_settings, "min_usefulness": "0"}
        with (
            start_server(self._console, self._options.models, settings) as server,
            httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
            progress(self._console, "Moments", self._num_moments) as turn,
        ):
            for file, position in _positions(self._texts, self._num_moments, random.Random(self._options.seed)):
                turn(file)
                document.rows.append(self._moment(client, file, position))
        shown = [moment for moment in document.rows if moment.is_shown]
        held_back = [moment for moment in document.rows if not moment.is_shown]
        document.notes += [
            f"{name} at {len(moments)} of {len(document.rows)} moments, with the right next word at "
            f"{sum(moment.has_right_word for moment in moments)}."
            for name, moments in (("Shown", shown), ("Held back", held_back))
        ]

    def _moment(self, client: httpx.Client, file: str, position: int) -> Moment:
        text = self._texts[file]
        context = trim_context(text[:position])
        response = client.post("/autocomplete", json={"context": context, **self._fields})
        if response.status_code != httpx.codes.OK:
            raise StartError(f"No suggestions in {file} at {position}: {response.text}")
        suggestions = [(each["value"], each["usefulness"]) for each in response.json()["sentences"]]
        return Moment(
            file=file,
            context=context[-SHOWN_CONTEXT_CHARS:],
            following=text[position : position + FOLLOWING_CHARS],
            suggestions=suggestions,
            is_shown=bool(suggestions) and suggestions[0][1] >= self._min_usefulness,
        )


def moments_markdown(moments: Sequence[Moment]) -> str:
    """A Markdown table. A space at an end of a text is written ␣, a line break ⏎."""
    lines = ["| context | suggestions (keys saved) | | the text that follows |", "|---|---|---|---|"]
    for moment in moments:
        suggestions = "<br>".join(f"{_cell(text)} ({usefulness:.1f})" for text, usefulness in moment.suggestions)
        is_shown = "shown" if moment.is_shown else "held back"
        lines.append(f"| …{_cell(moment.context)} | {suggestions} | {is_shown} | {_cell(moment.following)}… |")
    return "\n".join(lines)


def _positions(texts: Mapping[str, str], number: int, rng: random.Random) -> list[tuple[str, int]]:
    """(file name, position), uniform over all characters with enough text before and after them."""
    room = {file: len(text) - MIN_CONTEXT_CHARS - FOLLOWING_CHARS for file, text in texts.items()}
    files = rng.choices(list(room), list(room.values()), k=number)
    return [(file, MIN_CONTEXT_CHARS + rng.randrange(room[file])) for file in files]


def _cell(text: str) -> str:
    text = _MARKUP.sub(r"\\\1", text)
    text = re.sub(r"^ | $", "␣", text)
    return text.replace("\n", "⏎")
