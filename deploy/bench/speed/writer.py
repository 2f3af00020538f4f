"""`tercet bench writer`: what a writer gets of the real pools, and when.

Four parts. `stream`: how long after the engine's first token the first text is with the client. `typing`: writers
who press eight keys a second, each key a request. `deadlines`: what comes back by a time limit, and how punctually.
`distinct`: whether three sentences come, that differ and are whole, and what that costs. Decides who asks what when
and counts; refuses to know how the server does it, but for the times in its log.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.bench.harness.clients import LOOPBACK, Connection, Exchange
from deploy.bench.harness.options import Options, progress
from deploy.bench.harness.report import Document
from deploy.bench.harness.rounds import percentile
from deploy.bench.harness.server import Server
from gateway.generation.trimming import is_alike, rejection_reason
from shared.settings import Settings

KEYS_PER_S = 8
NUM_KEYS = 500
CROWD = 8
NUM_AT_ONCE = 64
NUM_STREAMS = 300
DEADLINES_S = (0.02, 0.05, 0.1, 0.2)
LENGTHS = (20, 256)  # tokens: what an editor asks for, and what no deadline of these allows
NUM_PER_DEADLINE = 200
NUM_CONTEXTS = 500
TEMPERATURE = 0.8
CONTEXT_CHARS = 1200
MIN_CONTEXT_CHARS = 300
QUICK_SHARE = 0.02
_ENDS_AT_WORD = re.compile(r"\w[^\w\s]*$")

Line = Mapping[str, Any]


class Part(msgspec.Struct, kw_only=True):
    """One line of a table: what was done, and figures by their headings."""

    part: str
    what: str
    figures: dict[str, float]


class WriterBench:
    """Asks a server of its own."""

    def __init__(self, options: Options, texts: Sequence[str], parts: Sequence[str], console: Console) -> None:
        """
        Args:
            texts: prose to write on; one that the model was trained on flatters it.
        """
        self._options = options
        self._texts = texts
        self._parts = {name: part for name, part in self._all_parts().items() if name in parts}
        self._console = console
        self._share = QUICK_SHARE if options.is_quick else 1.0
        self._of_thread = threading.local()

    def _all_parts(self) -> dict[str, Callable[[Document], None]]:
        return {
            "stream": self._stream,
            "typing": self._typing,
            "deadlines": self._deadlines,
            "distinct": self._distinct,
        }

    def run(self, document: Document) -> None:
        """Fills in the document's rows, one `Part` each."""
        with ExitStack() as stack:
            settings = {**self._options.server_settings, "log": "info"}
            with self._console.status("Starting a server to measure …"):
                self._server = stack.enter_context(Server(self._options.models, settings))
            document.settings["dtype in effect"] = self._server.slots()[0]["dtype"]
            for context in self._contexts(10, random.Random(1)):
                self._ask(context)
            for part in self._parts.values():
                part(document)

    def _number(self, whole: int) -> int:
        return max(4, int(whole * self._share))

    def _contexts(self, number: int, rng: random.Random) -> list[str]:
        """Ends of words, anywhere in the texts, each with what stands before it."""
        contexts: list[str] = []
        while len(contexts) < number:
            text = rng.choices(self._texts, [len(text) for text in self._texts])[0]
            found = re.search(r"(?<=\w)(?=\s)", text[rng.randrange(MIN_CONTEXT_CHARS, len(text)) :])
            if found is not None:
                place = text.index(found.string) + found.start()
                contexts.append(text[max(0, place - CONTEXT_CHARS) : place])
        return contexts

    def _ask(self, context: str, *, request_id: str = "", **fields: Any) -> Exchange:
        """On this thread's own connection."""
        if not hasattr(self._of_thread, "connection"):
            self._of_thread.connection = Connection(LOOPBACK, self._server.port)
        headers = {"X-Request-Id": request_id} if request_id else {}
        done: Exchange = self._of_thread.connection.exchange({"context": context, **fields}, headers)
        return done

    def _stream(self, document: Document) -> None:
        """Streamed answers one after another, with whole ones in turn; each of a pair is as often the first, which
        computes the prompt for both."""
        contexts = self._contexts(self._number(NUM_STREAMS), random.Random(2))
        streams, wholes = [], []
        with progress(self._console, "Streams", len(contexts)) as turn:
            for number, context in enumerate(contexts):
                turn("first text")
                if number % 2 == 0:
                    streams.append(self._ask(context, seed=number, stream=True))
                wholes.append(self._ask(context, seed=number))
                if number % 2 == 1:
                    streams.append(self._ask(context, seed=number, stream=True))
        branches = self._branches()
        delays = [
            1e3 * (one.first_text_at - min(line["first_token_at"] for line in branches[_body(one)["id"]]))
            for one in streams
        ]
        document.rows += [
            Part(part="stream", what="first text at the client after the engine's first token", figures=_times(delays)),
            Part(
                part="stream", what="first text after the request",
                figures=_times([1e3 * (one.first_text_at - one.started_at) for one in streams]),
            ),
            Part(part="stream", what="streamed answer, whole", figures=_times([one.ms for one in streams])),
            Part(part="stream", what="the same answer at once", figures=_times([one.ms for one in wholes])),
        ]  # fmt: skip

    def _branches(self) -> dict[str, list[Line]]:
        """The workers' log lines by request."""
        found: dict[str, list[Line]] = {}
        for line in self._server.log_lines():
            if line.get("event") == "branch_finished":
                found.setdefault(line["request_id"], []).append(line)
        return found

    def _typing(self, document: Document) -> None:
        """The same keys alone, with nothing else going on, and at eight a second."""
        num_keys = self._number(NUM_KEYS)
        rng = random.Random(3)
        texts = [self._passage(rng, num_keys) for _ in range(CROWD)]
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:  # threads are started when they are first needed, and stay
            list(pool.map(self._ask, self._contexts(2 * NUM_AT_ONCE, rng)))
        self._server.wait_until_idle()
        before = self._server.resources()
        with progress(self._console, "Typing", 2 + CROWD * num_keys) as turn:
            idle = []
            for key in range(num_keys):
                turn("one key after another")
                idle.append(self._ask(texts[0][: MIN_CONTEXT_CHARS + key], session="idle"))
            turn("one writer")
            one = self._type(texts[:1], "one")
            turn(f"{CROWD} writers")
            crowd = self._type(texts, "crowd")
        self._server.wait_until_idle()
        after = self._server.resources()
        branches = self._branches()
        document.rows.append(Part(part="typing", what="idle system", figures=_times([answer.ms for answer in idle])))
        for what, writers in (("one writer", [*one]), (f"{CROWD} writers", [*crowd])):
            answered = [answer.ms for writer in writers for answer in writer.values() if answer.status == 200]
            statuses = [answer.status for writer in writers for answer in writer.values()]
            overlaps = [overlap for writer in writers for overlap in _overlaps(branches, list(writer))]
            figures = {
                **_times(answered),
                "answered": len(answered) / len(statuses),
                "superseded": statuses.count(409) / len(statuses),
                "other": len(statuses) - len(answered) - statuses.count(409),
                "overlap max ms": max(overlaps, default=0.0),
                "p99 ÷ idle": percentile(answered, 0.99) / percentile([answer.ms for answer in idle], 0.99),
            }
            document.rows.append(Part(part="typing", what=what, figures=figures))
        leaks = {f"{name} more": float(after[name] - before[name]) for name in ("descriptors", "threads")}
        leaks["sequences"] = float(after["sequences"])
        document.rows.append(Part(part="typing", what="afterwards, when all is quiet", figures=leaks))

    def _passage(self, rng: random.Random, num_keys: int) -> str:
        text = rng.choice(self._texts)
        start = rng.randrange(0, max(1, len(text) - MIN_CONTEXT_CHARS - num_keys))
        return text[start : start + MIN_CONTEXT_CHARS + num_keys]

    def _type(self, texts: Sequence[str], name: str) -> list[dict[str, Exchange]]:
        """Writers who begin together; of each, its answers by request."""
        start = time.monotonic() + 0.2
        found: list[dict[str, Exchange]] = [{} for _ in texts]

        def write(writer: int) -> None:
            offset = writer / len(texts) / KEYS_PER_S  # they do not strike in time
            waiting: list[Future[None]] = []
            with ThreadPoolExecutor(8) as pool:
                for key in range(len(texts[writer]) - MIN_CONTEXT_CHARS):
                    time.sleep(max(0.0, start + offset + key / KEYS_PER_S - time.monotonic()))
                    waiting.append(pool.submit(press, writer, key))
            for one in waiting:
                one.result()

        def press(writer: int, key: int) -> None:
            context, session = texts[writer][: MIN_CONTEXT_CHARS + key], f"{name}-{writer}"
            request_id = f"{session}-{key}"
            found[writer][request_id] = self._ask(context, session=session, request_id=request_id)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        order = [sorted(answers, key=lambda request: int(request.rsplit("-", 1)[1])) for answers in found]
        return [
            {request: answers[request] for request in requests} for answers, requests in zip(found, order, strict=True)
        ]

    def _deadlines(self, document: Document) -> None:
        """Requests one after another, deadlines and lengths in turn."""
        cases = [(deadline_s, length) for length in LENGTHS for deadline_s in DEADLINES_S]
        found: dict[tuple[float, int], list[Exchange]] = {case: [] for case in cases}
        number = self._number(NUM_PER_DEADLINE)
        contexts = self._contexts(number, random.Random(4))
        with progress(self._console, "Deadlines", number) as turn:
            for context in contexts:
                turn("")
                for deadline_s, length in cases:
                    answer = self._ask(context, max_time=deadline_s, length=length)
                    found[deadline_s, length].append(answer)
        for (deadline_s, length), answers in found.items():
            bodies = [_body(answer) for answer in answers if answer.status == 200]
            values = [one["value"] for body in bodies for one in body["sentences"]]
            over = [answer.ms - 1e3 * deadline_s for answer in answers]
            figures = {
                "whole": sum(not body["partial"] for body in bodies) / number,
                "partial": sum(body["partial"] for body in bodies) / number,
                "504": sum(answer.status == 504 for answer in answers) / number,
                "sentences": len(values) / number,
                "words": sum(len(value.split()) for value in values) / max(1, len(values)),
                "end at a word": sum(bool(_ENDS_AT_WORD.search(value)) for value in values) / max(1, len(values)),
                "ms after it p50": percentile(over, 0.5),
                "p99": percentile(over, 0.99),
                "max": max(over),
            }
            what = f"{1e3 * deadline_s:.0f} ms, {length} tokens"
            document.rows.append(Part(part="deadlines", what=what, figures=figures))

    def _distinct(self, document: Document) -> None:
        """Contexts one after another."""
        contexts = self._contexts(self._number(NUM_CONTEXTS), random.Random(5))
        answers = []
        with progress(self._console, "Contexts", len(contexts)) as turn:
            for number, context in enumerate(contexts):
                turn("")
                answers.append(
                    self._ask(context, temperature=TEMPERATURE, seed=number, request_id=f"distinct-{number}")
                )
        lines = {
            line["request_id"]: line for line in self._server.log_lines() if line.get("event") == "request_finished"
        }
        logged = [lines[f"distinct-{number}"] for number in range(len(contexts))]
        sentences = [[one["value"] for one in _body(answer).get("sentences", [])] for answer in answers]
        values = [(context, value) for context, some in zip(contexts, sentences, strict=True) for value in some]
        similarity = Settings.load({}).similarity
        differ = [
            len(some) == 3 and not any(is_alike(a, b, similarity) for a in some for b in some if a is not b)
            for some in sentences
        ]
        added = [float(line.get("added_ms", 0.0)) for line in logged]
        figures = {
            "three that differ": sum(differ) / len(differ),
            "end at a word": sum(bool(_ENDS_AT_WORD.search(value)) for _, value in values) / len(values),
            "loops": sum(rejection_reason(value, context) is not None for context, value in values),
            "topped up": sum(line.get("top_ups", 0) > 0 for line in logged) / len(logged),
            "words": sum(len(value.split()) for _, value in values) / len(values),
            "added ms p50": percentile(added, 0.5),
            "added ms p99": percentile(added, 0.99),
            **_times([answer.ms for answer in answers]),
        }
        document.rows.append(Part(part="distinct", what=f"temperature {TEMPERATURE:g}", figures=figures))


PARTS = ("stream", "typing", "deadlines", "distinct")


def tables(rows: Sequence[Part]) -> list[Table]:
    """One for each part and each set of headings."""
    found: dict[tuple[str, ...], Table] = {}
    for row in rows:
        key = (row.part, *row.figures)
        if key not in found:
            found[key] = Table(row.part, *row.figures)
            for column in found[key].columns[1:]:
                column.justify = "right"
        cells = [f"{value:.1%}" if name in _SHARES else f"{value:,.2f}" for name, value in row.figures.items()]
        found[key].add_row(row.what, *cells)
    return list(found.values())


_SHARES = {
    "answered", "superseded", "whole", "partial", "504", "end at a word", "three that differ", "topped up",
}  # fmt: skip


def _body(answer: Exchange) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(answer.answer)
    return body


def _times(samples_ms: Sequence[float]) -> dict[str, float]:
    names = {"p50 ms": 0.5, "p90 ms": 0.9, "p99 ms": 0.99, "max ms": 1.0}
    return {name: percentile(samples_ms, share) for name, share in names.items()} | {"n": float(len(samples_ms))}


def _overlaps(branches: Mapping[str, Sequence[Line]], requests: Sequence[str]) -> list[float]:
    """Milliseconds for which each of a writer's requests was still computed when the next one was."""
    spans = [
        (min(line["started_at"] for line in lines), max(line["ended_at"] for line in lines))
        for request in requests
        if (lines := branches.get(request))
    ]
    return [max(0.0, 1e3 * (end - start)) for (_, end), (start, _) in pairwise(spans)]
