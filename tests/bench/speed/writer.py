"""The latency parts of `writer`: streaming, typing, deadlines.

`stream`: how long after the engine's first token the client has the first text delta. `typing`: writers whose every
key is a request. `deadlines`: what is returned by a deadline, and how punctually. Knows the
server only by its responses and the times in its log.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from deploy.load.clients import Exchange
from deploy.load.rounds import percentile
from deploy.load.run import progress
from tests.bench.speed.writer_session import (
    LogLine,
    Part,
    WriterSession,
    ends_at_word,
    latency_figures,
    read_body,
)

NUM_KEYS = 500
THREADS_PER_WRITER = 8
START_DELAY_S = 0.2  # until all writers' threads have started
NUM_STREAMS = 300
DEADLINES_S = (0.02, 0.05, 0.1, 0.2)
LENGTHS = (20, 256)  # tokens: an editor's default, and more than any of the deadlines allows for
NUM_PER_DEADLINE = 200

# Headings whose figures are shares.
PERCENTAGES = frozenset({"answered", "superseded", "complete", "partial", "504", "end at a word"})


def measure_streams(session: WriterSession) -> list[Part]:
    """Streamed and unstreamed requests with the same context in turns.

    The first of a pair prefills the prompt for both; streamed requests are first as often as second.
    """
    contexts = session.contexts(session.num_repeats(NUM_STREAMS), random.Random(2))
    streamed, unstreamed = [], []
    with progress(session.console, "Streams", len(contexts)) as turn:
        for number, context in enumerate(contexts):
            turn("time to first token")
            if number % 2 == 0:
                streamed.append(session.request(context, seed=number, stream=True))
            unstreamed.append(session.request(context, seed=number))
            if number % 2 == 1:
                streamed.append(session.request(context, seed=number, stream=True))
    branches = session.log_lines("branch_finished")
    delays_ms = [
        1e3 * (done.first_text_at - min(line["first_token_at"] for line in branches[read_body(done)["id"]]))
        for done in streamed
    ]
    samples_ms = {
        "first text at the client − first token in the engine": delays_ms,
        "time to first token, at the client": [1e3 * (done.first_text_at - done.started_at) for done in streamed],
        "streamed response, complete": [done.ms for done in streamed],
        "same request, not streamed": [done.ms for done in unstreamed],
    }
    return [Part(part="stream", what=what, figures=latency_figures(values)) for what, values in samples_ms.items()]


def measure_typing(session: WriterSession) -> list[Part]:
    """The same keys one request at a time on an idle server, then typed by one writer and by several at once.

    On the idle server a writer waits for each answer, and then for as long as a key takes: no work of an earlier
    request is left. Every writer has a session of its own, so a request that is unfinished at the next key is
    superseded.
    """
    num_keys = session.num_repeats(NUM_KEYS)
    num_writers = session.options.num_writers
    rng = random.Random(3)
    texts = [session.passage(num_keys, rng) for _ in range(num_writers)]
    # The server starts a thread when it first needs it, and keeps it.
    num_connections = num_writers * THREADS_PER_WRITER
    with ThreadPoolExecutor(num_connections) as pool:
        list(pool.map(session.request, session.contexts(2 * num_connections, rng)))
    session.server.wait_until_idle()
    before = session.server.resources()
    with progress(session.console, "Typing", 2 + num_keys) as turn:
        idle = []
        for key in range(num_keys):
            turn("idle server")
            idle.append(session.request(texts[0][: session.options.context_chars + key], session="idle"))
            time.sleep(1 / session.options.keys_per_s)
        turn("one writer")
        one_writer = _type(session, texts[:1], "one")
        turn(f"{num_writers} writers")
        all_writers = _type(session, texts, "all")
    session.server.wait_until_idle()
    after = session.server.resources()
    branches = session.log_lines("branch_finished")
    idle_ms = [done.ms for done in idle]
    resources = {f"extra {name}": float(after[name] - before[name]) for name in ("descriptors", "threads")}
    resources["sequences"] = float(after["sequences"])
    return [
        Part(part="typing", what="idle server", figures=latency_figures(idle_ms)),
        _typing_row("one writer", one_writer, branches, idle_ms),
        _typing_row(f"{num_writers} writers", all_writers, branches, idle_ms),
        Part(part="typing", what="resources afterwards, server idle", figures=resources),
    ]


def _typing_row(
    what: str,
    writers: Sequence[Mapping[str, Exchange]],
    branches: Mapping[str, Sequence[LogLine]],
    idle_ms: Sequence[float],
) -> Part:
    answered_ms = [done.ms for writer in writers for done in writer.values() if done.status == 200]
    statuses = [done.status for writer in writers for done in writer.values()]
    overlaps_ms = [overlap for writer in writers for overlap in _overlaps_ms(branches, list(writer))]
    num_superseded = statuses.count(409)
    figures = {
        **latency_figures(answered_ms),
        "answered": len(answered_ms) / len(statuses),
        "superseded": num_superseded / len(statuses),
        "other": len(statuses) - len(answered_ms) - num_superseded,
        "overlap max ms": max(overlaps_ms, default=0.0),
        "p99 ÷ idle p99": percentile(answered_ms, 0.99) / percentile(idle_ms, 0.99),
    }
    return Part(part="typing", what=what, figures=figures)


def _type(session: WriterSession, texts: Sequence[str], name: str) -> list[dict[str, Exchange]]:
    """Writers who start together, one for each text. For each: request id → exchange, in typing order."""
    start = time.monotonic() + START_DELAY_S
    context_chars, keys_per_s = session.options.context_chars, session.options.keys_per_s
    found: list[dict[int, Exchange]] = [{} for _ in texts]  # by key

    def write(writer: int) -> None:
        offset_s = writer / len(texts) / keys_per_s  # the writers' keys are evenly spaced
        requests: list[Future[None]] = []
        with ThreadPoolExecutor(THREADS_PER_WRITER) as pool:
            for key in range(len(texts[writer]) - context_chars):
                time.sleep(max(0.0, start + offset_s + key / keys_per_s - time.monotonic()))
                requests.append(pool.submit(press, writer, key))
        for request in requests:
            request.result()

    def press(writer: int, key: int) -> None:
        context, editor = texts[writer][: context_chars + key], f"{name}-{writer}"
        found[writer][key] = session.request(context, session=editor, request_id=f"{editor}-{key}")

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        {f"{name}-{writer}-{key}": exchanges[key] for key in sorted(exchanges)}
        for writer, exchanges in enumerate(found)
    ]


def _overlaps_ms(branches: Mapping[str, Sequence[LogLine]], requests: Sequence[str]) -> list[float]:
    """Milliseconds for which each of a writer's requests was still in the engine when the next one started there."""
    spans = [
        (min(line["started_at"] for line in lines), max(line["ended_at"] for line in lines))
        for request in requests
        if (lines := branches.get(request))
    ]
    return [max(0.0, 1e3 * (end - start)) for (_, end), (start, _) in pairwise(spans)]


def measure_deadlines(session: WriterSession) -> list[Part]:
    """One request after another; deadlines and lengths in turns."""
    cases = [(deadline_s, length) for length in LENGTHS for deadline_s in DEADLINES_S]
    found: dict[tuple[float, int], list[Exchange]] = {case: [] for case in cases}
    contexts = session.contexts(session.num_repeats(NUM_PER_DEADLINE), random.Random(4))
    with progress(session.console, "Deadlines", len(contexts)) as turn:
        for context in contexts:
            turn(f"{len(cases)} requests")
            for deadline_s, length in cases:
                found[deadline_s, length].append(session.request(context, max_time=deadline_s, length=length))
    return [_deadline_row(*case, exchanges) for case, exchanges in found.items()]


def _deadline_row(deadline_s: float, length: int, exchanges: Sequence[Exchange]) -> Part:
    number = len(exchanges)
    bodies = [read_body(done) for done in exchanges if done.status == 200]
    sentences = [sentence["value"] for body in bodies for sentence in body["sentences"]]
    late_ms = [done.ms - 1e3 * deadline_s for done in exchanges]
    figures = {
        "complete": sum(not body["partial"] for body in bodies) / number,
        "partial": sum(body["partial"] for body in bodies) / number,
        "504": sum(done.status == 504 for done in exchanges) / number,
        "sentences": len(sentences) / number,
        "words": sum(len(sentence.split()) for sentence in sentences) / max(1, len(sentences)),
        "end at a word": sum(map(ends_at_word, sentences)) / max(1, len(sentences)),
        "past the deadline, p50 ms": percentile(late_ms, 0.5),
        "p99 ms": percentile(late_ms, 0.99),
        "max ms": max(late_ms),
    }
    return Part(part="deadlines", what=f"{1e3 * deadline_s:.0f} ms, {length} tokens", figures=figures)
