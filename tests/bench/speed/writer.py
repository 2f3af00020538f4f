"""`writer`: latency for a writer, in three parts.

`stream`: how long after the engine's first token the client has the first text delta. `typing`: writers whose every
key is a request. `crowd`: ever more of them, past what the server can answer. Knows the server only by its responses
and the times in its log.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from deploy.tuning.load.clients import Exchange
from deploy.tuning.load.run import progress
from tests.bench.results import Row, err
from tests.bench.rounds import latencies, percent, percentile
from tests.bench.run import BenchDocument, Options
from tests.bench.server import MeasuredServer, ThreadConnections, start_server

CONTEXT_CHARS = 1200
MIN_CONTEXT_CHARS = 300
NUM_WARM_UPS = 10
QUICK_SHARE = 0.02
MIN_REPEATS = 4
NUM_KEYS = 500
THREADS_PER_WRITER = 8
START_DELAY_S = 0.2  # until all writers' threads have started
CROWDS = (4, 8, 16, 24, 32, 48, 64)
CROWD_KEYS = 120  # of each writer
CROWD_PAUSE_S = 1.0  # after which clients have forgotten the last crowd's refusals
NUM_STREAMS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How the writers of a run write.

    Attributes:
        fields: fields of each request to `POST /autocomplete`, unless a part sets them itself.
        num_writers: writers at once, where a part has several.
        keys_per_s: keys that each writer types per second.
        context_chars: text before a writer's first key.
    """

    fields: Mapping[str, Any]
    num_writers: int
    keys_per_s: float
    context_chars: int


class WriterBench:
    """A warm server and the texts that its writers write."""

    def __init__(self, server: MeasuredServer, texts: Sequence[str], options: WriterOptions, *, is_quick: bool) -> None:
        self._server = server
        self._options = options
        self._texts = texts
        self._share = QUICK_SHARE if is_quick else 1.0
        self._connections = ThreadConnections(server.port)

    def measure_streams(self) -> list[Row]:
        """Streamed and unstreamed requests with the same context in turns.

        The first of a pair prefills the prompt for both; streamed requests are first as often as second.
        """
        contexts = self.contexts(self._num_repeats(NUM_STREAMS), random.Random(2))
        streamed, unstreamed = [], []
        with progress(err, "Streams", len(contexts)) as turn:
            for number, context in enumerate(contexts):
                turn("time to first token")
                if number % 2 == 0:
                    streamed.append(self.request(context, seed=number, stream=True))
                unstreamed.append(self.request(context, seed=number))
                if number % 2 == 1:
                    streamed.append(self.request(context, seed=number, stream=True))
        first_tokens_at: dict[str, float] = {}  # by request
        for line in self._server.log_lines():
            if line.get("event") == "branch_finished":
                earlier = first_tokens_at.get(line["request_id"], line["first_token_at"])
                first_tokens_at[line["request_id"]] = min(earlier, line["first_token_at"])
        samples_ms = {
            "first text at the client − first token in the engine": [
                1e3 * (done.first_text_at - first_tokens_at[json.loads(done.answer)["id"]]) for done in streamed
            ],
            "time to first token, at the client": [1e3 * (done.first_text_at - done.started_at) for done in streamed],
            "streamed response, complete": [done.ms for done in streamed],
            "same request, not streamed": [done.ms for done in unstreamed],
        }
        return [{"stream": what, **latencies(values)} for what, values in samples_ms.items()]

    def measure_typing(self) -> list[Row]:
        """The same keys one request at a time on an idle server, then typed by one writer and by several at once.

        On the idle server a writer waits for each answer, and then for as long as a key takes: no work of an earlier
        request is left. Every writer has a session of its own, so a request that is unfinished at the next key is
        superseded.
        """
        options = self._options
        num_keys, num_writers = self._num_repeats(NUM_KEYS), options.num_writers
        rng = random.Random(3)
        texts = [self._passage(num_keys, rng) for _ in range(num_writers)]
        # The server starts a thread when it first needs it, and keeps it.
        num_connections = num_writers * THREADS_PER_WRITER
        with ThreadPoolExecutor(num_connections) as pool:
            list(pool.map(self.request, self.contexts(2 * num_connections, rng)))
        self._server.wait_until_idle()
        with progress(err, "Typing", 2 + num_keys) as turn:
            idle_ms = []
            for key in range(num_keys):
                turn("idle server")
                idle_ms.append(self.request(texts[0][: options.context_chars + key], session="idle").ms)
                time.sleep(1 / options.keys_per_s)
            turn("one writer")
            one_writer = self._type(texts[:1], "one")
            turn(f"{num_writers} writers")
            all_writers = self._type(texts, "all")
        rows: list[Row] = [{"typing": "idle server", **latencies(idle_ms)}]
        for what, exchanges in (("one writer", one_writer), (f"{num_writers} writers", all_writers)):
            answered_ms = [done.ms for own in exchanges for done in own if done.status == 200]
            statuses = [done.status for own in exchanges for done in own]
            num_superseded = statuses.count(409)
            rows.append(
                {
                    "typing": what,
                    **latencies(answered_ms or [0.0]),
                    "answered/s": options.keys_per_s * len(exchanges) * len(answered_ms) / len(statuses),
                    "answered %": percent(len(answered_ms), len(statuses)),
                    "superseded %": percent(num_superseded, len(statuses)),
                    "other": len(statuses) - len(answered_ms) - num_superseded,
                    "p99 ÷ idle p99": percentile(answered_ms or [0.0], 0.99) / percentile(idle_ms, 0.99),
                }
            )
        return rows

    def measure_crowds(self) -> list[Row]:
        """Crowds of writers, one after another, each writer with a session of its own and an uneven rhythm.

        `answered/s` leaves out the first quarter, in which queues fill. `of the most` compares it with the crowd that
        got the most answers: what the server can answer. The clients compute on the same cores.
        """
        num_keys = self._num_repeats(CROWD_KEYS)
        rows = []
        with progress(err, "Crowds", len(CROWDS)) as turn:
            for num_writers in CROWDS:
                turn(f"{num_writers} writers")
                rng = random.Random(num_writers)
                texts = [self._passage(num_keys, rng) for _ in range(num_writers)]
                rows.append(_crowd_row(self._type(texts, f"crowd-{num_writers}", is_even=False)))
                self._server.wait_until_idle()
                time.sleep(CROWD_PAUSE_S)
        most = max(rate for _, rate in rows)
        return [row | {"of the most %": percent(rate, most)} for row, rate in rows]

    def _type(self, texts: Sequence[str], name: str, *, is_even: bool = True) -> list[list[Exchange]]:
        """Writers who start together, one for each text. For each the exchanges in typing order.

        Args:
            is_even: the writers' keys are evenly spaced; False: the pause before a key is random, between half and one
                and a half times as long.
        """
        start = time.monotonic() + START_DELAY_S
        context_chars, keys_per_s = self._options.context_chars, self._options.keys_per_s

        def write(writer: int) -> list[Exchange]:
            rng, text = random.Random(writer), texts[writer]
            due = start + writer / len(texts) / keys_per_s
            requests: list[Future[Exchange]] = []
            with ThreadPoolExecutor(THREADS_PER_WRITER) as pool:
                for key in range(len(text) - context_chars):
                    time.sleep(max(0.0, due - time.monotonic()))
                    context = text[: context_chars + key]
                    requests.append(pool.submit(self.request, context, session=f"{name}-{writer}"))
                    due += (1.0 if is_even else rng.uniform(0.5, 1.5)) / keys_per_s
            return [request.result() for request in requests]

        with ThreadPoolExecutor(len(texts)) as pool:
            exchanges = list(pool.map(write, range(len(texts))))
        self._server.wait_until_idle()
        return exchanges

    def _num_repeats(self, full: int) -> int:
        """How often to measure what a full run measures `full` times."""
        return max(MIN_REPEATS, int(full * self._share))

    def contexts(self, number: int, rng: random.Random) -> list[str]:
        """Random positions at the end of a word, each with up to `CONTEXT_CHARS` of the text before it."""
        contexts: list[str] = []
        while len(contexts) < number:
            text = rng.choices(self._texts, [len(text) for text in self._texts])[0]
            found = re.search(r"(?<=\w)(?=\s)", text[rng.randrange(MIN_CONTEXT_CHARS, len(text)) :])
            if found is not None:
                end = text.index(found.string) + found.start()
                contexts.append(text[max(0, end - CONTEXT_CHARS) : end])
        return contexts

    def _passage(self, num_keys: int, rng: random.Random) -> str:
        """The context before a writer's first key, then `num_keys` characters to type."""
        text = rng.choice(self._texts)
        num_chars = self._options.context_chars + num_keys
        start = rng.randrange(0, max(1, len(text) - num_chars))
        return text[start : start + num_chars]

    def request(self, context: str, **fields: Any) -> Exchange:
        """`POST /autocomplete` on the calling thread's own connection."""
        return self._connections.exchange({"context": context, **self._options.fields, **fields})


PARTS: Mapping[str, Callable[[WriterBench], list[Row]]] = {
    "stream": WriterBench.measure_streams,
    "typing": WriterBench.measure_typing,
    "crowd": WriterBench.measure_crowds,
}


def run_parts(
    parts: Sequence[str],
    options: Options,
    writing: WriterOptions,
    texts: Sequence[str],
    document: BenchDocument,
) -> None:
    """Start a server and run the parts one after another; their rows go into the document."""
    document.workload = asdict(writing)
    with start_server(options.models, {**options.server_settings, "log": "debug"}) as server:
        document.settings |= server.in_effect()
        bench = WriterBench(server, texts, writing, is_quick=options.is_quick)
        for context in bench.contexts(NUM_WARM_UPS, random.Random(1)):
            bench.request(context)
        for part in parts:
            document.rows += PARTS[part](bench)


def _crowd_row(writers: Sequence[Sequence[Exchange]]) -> tuple[Row, float]:
    """Also the answers per second."""
    exchanges = [done for writer in writers for done in writer]
    began_at = min(done.started_at for done in exchanges)
    span_s = max(done.started_at for done in exchanges) - began_at
    answered = [done for done in exchanges if done.status == 200]
    settled = [done for done in answered if 0.25 * span_s < done.ended_at - began_at <= span_s]
    statuses = [done.status for done in exchanges]
    answered_per_s = len(settled) / (0.75 * span_s)
    row: Row = {
        "writers": len(writers),
        "keys/s": len(exchanges) / span_s,
        "answered/s": answered_per_s,
        "answered %": percent(len(answered), len(statuses)),
        "superseded %": percent(statuses.count(409), len(statuses)),
        "refused %": percent(statuses.count(503), len(statuses)),
        "other": sum(status not in {200, 409, 503} for status in statuses),
        "least of a writer %": min(
            percent(sum(done.status == 200 for done in writer), len(writer)) or 0.0 for writer in writers
        ),
        **latencies([done.ms for done in answered] or [0.0]),
    }
    return row, answered_per_s
