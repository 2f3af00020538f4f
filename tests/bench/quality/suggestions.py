"""Where the simulated writers get suggestions from: the gateway. `typist --openings` shows some to a person.

No figure distinguishes word salad from a sentence: ten openings, five suggestions each, always with the same seeds, so
that two checkpoints or two settings can be compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from deploy.tuning.load.run import progress
from deploy.tuning.load.server import ROOT
from shared.errors import StartError
from tests.bench.quality.keystrokes import Answer
from tests.bench.quality.passages import trim_context
from tests.bench.results import err
from tests.bench.run import BenchDocument, Options
from tests.bench.server import MeasuredServer, ThreadConnections, start_server

OPENINGS = ROOT / "workers" / "training" / "openings.txt"
NUM_SUGGESTIONS = 5
NUM_WARM_UPS = 10
PREDICTIONS = {"n_samples": 3, "strategy": "predict"}  # what an editor requests at each key
SEEDS_APART = 1000  # further than a request's branches and those that replace them
# A connection that was idle, or a machine with other load. The latency is that of the last attempt.
RETRIED = {0, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
RETRY_WAITS_S = (0.0, 1.0, 2.0, 4.0, 8.0)


class GatewaySource:
    """The gateway, over a connection of each thread's own."""

    def __init__(self, server: MeasuredServer, fields: Mapping[str, Any]) -> None:
        """
        Args:
            fields: fields of each request, as in `POST /autocomplete`.
        """
        self.dtype = server.in_effect()["dtype in effect"]
        self._connections = ThreadConnections(server.port)
        self._fields = fields

    def suggest(self, context: str, seed: int, **fields: Any) -> Answer:
        """
        Args:
            fields: further fields of this request.

        Raises:
            StartError: the request failed, so that savings would be too low.
        """
        body = {"context": context, "seed": seed, **self._fields, **fields}
        done = self._connections.exchange(body)
        for wait_s in RETRY_WAITS_S:
            if done.status not in RETRIED:
                break
            time.sleep(wait_s)
            done = self._connections.exchange(body)
        if done.status != HTTPStatus.OK:
            raise StartError(f"The server under test answered with status {done.status} (0: connection lost).")
        sentences = json.loads(done.answer)["sentences"]
        usefulness = tuple(sentence["usefulness"] for sentence in sentences if "usefulness" in sentence)
        words = tuple(
            tuple((word["text"], word["probability"]) for word in each.get("words", ())) for each in sentences
        )
        return Answer(tuple(sentence["value"] for sentence in sentences), done.ms, usefulness, words)


@contextmanager
def gateway_source(options: Options, fields: Mapping[str, Any]) -> Iterator[GatewaySource]:
    """A server of its own, warmed up."""
    with start_server(options.models, options.server_settings) as server:
        source = GatewaySource(server, fields)
        for seed in range(NUM_WARM_UPS):
            source.suggest("Once upon a time there was", seed)
        yield source


def ask(
    options: Options,
    cursors: Sequence[tuple[str, str, int]],
    fields: Mapping[str, Any],
    document: BenchDocument,
) -> list[Answer]:
    """The answers at cursors, one after the other, from a server of its own.

    Args:
        cursors: of each the text before it, the text after it, which is not read if it is blank, and a seed.
        fields: fields of each request, as in `POST /autocomplete`.

    Raises:
        StartError: a request failed.
    """
    document.workload = {"fields": fields}
    with (
        gateway_source(options, fields) as source,
        progress(err, f"Requests, {options.models}", len(cursors)) as turn,
    ):
        answers = []
        for before, after, seed in cursors:
            turn("")
            answers.append(source.suggest(trim_context(before), options.seed + seed, suffix=after))
    return answers


def sample_openings(options: Options, fields: Mapping[str, Any], document: BenchDocument) -> None:
    """Fill the document.

    Args:
        fields: fields of each request, as in `POST /autocomplete`.

    Raises:
        StartError: the server returned no suggestions for an opening.
    """
    openings = OPENINGS.read_text(encoding="utf-8").splitlines()
    cursors = [(opening, "", SEEDS_APART * number) for number, opening in enumerate(openings)]
    answers = ask(options, cursors, {"n_samples": NUM_SUGGESTIONS, **fields}, document)
    # Without a leading space, a suggestion completes the opening's last word.
    document.rows = [
        {"opening": opening, "suggestion": "…" + " / ".join(filter(None, suggestion.split("\n")))}
        for opening, answer in zip(openings, answers, strict=True)
        for suggestion in answer.suggestions
    ]
