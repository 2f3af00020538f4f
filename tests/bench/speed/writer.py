"""The parts of `writer`: streaming, typing, a crowd, distinct sentences.

`stream`: how long after the engine's first token the client has the first text delta. `typing`: writers whose every
key is a request. `crowd`: ever more of them, past what the server can answer. `distinct`:
whether a request gets three whole sentences that differ, judged by the gateway's rules of similarity and repetition, by
which it also selects; whether a sentence ends at a word is judged independently. Knows the server only by its responses
and the times in its log.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from deploy.load.clients import Exchange
from deploy.load.run import progress
from gateway.generation.trimming import is_alike, rejection_reason
from shared.settings import Settings
from tests.bench.rounds import percentile
from tests.bench.speed.writer_session import (
    LogLine,
    Part,
    WriterSession,
    ends_at_word,
    latency_figures,
)

NUM_KEYS = 500
THREADS_PER_WRITER = 8
START_DELAY_S = 0.2  # until all writers' threads have started
CROWDS = (4, 8, 16, 24, 32, 48, 64)
CROWD_KEYS = 120  # of each writer
CROWD_PAUSE_S = 1.0  # after which clients have forgotten the last crowd's refusals
NUM_STREAMS = 300
NUM_CONTEXTS = 500
TEMPERATURE = 0.8
NUM_SENTENCES = 3

# Headings whose figures are shares.
PERCENTAGES = frozenset(
    {"answered", "superseded", "refused", "of the most", "complete", "partial", "504", "end at a word"}
    | {"3 distinct sentences", "with top-up branches"}
)


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
        1e3 * (done.first_text_at - min(line["first_token_at"] for line in branches[json.loads(done.answer)["id"]]))
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
    branches = session.log_lines("branch_finished")
    idle_ms = [done.ms for done in idle]
    return [
        Part(part="typing", what="idle server", figures=latency_figures(idle_ms)),
        _typing_row("one writer", one_writer, branches, idle_ms),
        _typing_row(f"{num_writers} writers", all_writers, branches, idle_ms),
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


def _type(
    session: WriterSession, texts: Sequence[str], name: str, *, is_even: bool = True
) -> list[dict[str, Exchange]]:
    """Writers who start together, one for each text. For each: request id → exchange, in typing order.

    Args:
        is_even: the writers' keys are evenly spaced; False: the pause before a key is random, between half and one and
            a half times as long.
    """
    start = time.monotonic() + START_DELAY_S
    context_chars, keys_per_s = session.options.context_chars, session.options.keys_per_s
    found: list[dict[int, Exchange]] = [{} for _ in texts]  # by key

    def write(writer: int) -> None:
        rng = random.Random(writer)
        due = start + writer / len(texts) / keys_per_s
        requests: list[Future[None]] = []
        with ThreadPoolExecutor(THREADS_PER_WRITER) as pool:
            for key in range(len(texts[writer]) - context_chars):
                time.sleep(max(0.0, due - time.monotonic()))
                requests.append(pool.submit(press, writer, key))
                due += (1.0 if is_even else rng.uniform(0.5, 1.5)) / keys_per_s
        for request in requests:
            request.result()

    def press(writer: int, key: int) -> None:
        context, editor = texts[writer][: context_chars + key], f"{name}-{writer}"
        found[writer][key] = session.request(context, session=editor, request_id=f"{editor}-{key}")

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write, range(len(texts))))
    return [
        {f"{name}-{writer}-{key}": exchanges[key] for key in sorted(exchanges)}
        for writer, exchanges in enumerate(found)
    ]


def measure_crowds(session: WriterSession) -> list[Part]:
    """Crowds of writers, one after another, each writer with a session of its own and an uneven rhythm.

    `answered/s` leaves out the first quarter, in which queues fill. `of the most` compares it with the crowd that got
    the most answers: what the server can answer. The clients compute on the same cores.
    """
    num_keys = session.num_repeats(CROWD_KEYS)
    rows = []
    with progress(session.console, "Crowds", len(CROWDS)) as turn:
        for num_writers in CROWDS:
            turn(f"{num_writers} writers")
            rng = random.Random(num_writers)
            texts = [session.passage(num_keys, rng) for _ in range(num_writers)]
            rows.append(_crowd_row(session, _type(session, texts, f"crowd-{num_writers}", is_even=False)))
            session.server.wait_until_idle()
            time.sleep(CROWD_PAUSE_S)
    most = max(row.figures["answered/s"] for row in rows)
    for row in rows:
        row.figures["of the most"] = row.figures["answered/s"] / most
    return rows


def _crowd_row(session: WriterSession, writers: Sequence[Mapping[str, Exchange]]) -> Part:
    exchanges = [done for writer in writers for done in writer.values()]
    began_at = min(done.started_at for done in exchanges)
    span_s = max(done.started_at for done in exchanges) - began_at
    answered = [done for done in exchanges if done.status == 200]
    settled = [done for done in answered if 0.25 * span_s < done.ended_at - began_at <= span_s]
    statuses = [done.status for done in exchanges]
    each = sorted(sum(done.status == 200 for done in writer.values()) / len(writer) for writer in writers)
    figures = {
        "keys/s": len(exchanges) / span_s,
        "answered/s": len(settled) / (0.75 * span_s),
        "answered": len(answered) / len(statuses),
        "superseded": statuses.count(409) / len(statuses),
        "refused": statuses.count(503) / len(statuses),
        "other": float(sum(status not in {200, 409, 503} for status in statuses)),
        "least of a writer": each[0],
        **latency_figures([done.ms for done in answered] or [0.0]),
    }
    return Part(part="crowd", what=f"{len(writers)} writers", figures=figures)


def _overlaps_ms(branches: Mapping[str, Sequence[LogLine]], requests: Sequence[str]) -> list[float]:
    """Milliseconds for which each of a writer's requests was still in the engine when the next one started there."""
    spans = [
        (min(line["started_at"] for line in lines), max(line["ended_at"] for line in lines))
        for request in requests
        if (lines := branches.get(request))
    ]
    return [max(0.0, 1e3 * (end - start)) for (_, end), (start, _) in pairwise(spans)]


def measure_distinct(session: WriterSession) -> list[Part]:
    """One request for each context, one after another."""
    contexts = session.contexts(session.num_repeats(NUM_CONTEXTS), random.Random(5))
    exchanges = []
    with progress(session.console, "Contexts", len(contexts)) as turn:
        for number, context in enumerate(contexts):
            turn("one request")
            exchanges.append(
                session.request(context, temperature=TEMPERATURE, seed=number, request_id=f"distinct-{number}")
            )
    lines = session.log_lines("request_finished")
    logged = [lines[f"distinct-{number}"][-1] for number in range(len(contexts))]
    answers = [[sentence["value"] for sentence in json.loads(done.answer).get("sentences", [])] for done in exchanges]
    sentences = [(context, value) for context, values in zip(contexts, answers, strict=True) for value in values]
    similarity = Settings.load({}).model.similarity
    added_ms = [float(line.get("added_ms", 0.0)) for line in logged]
    figures = {
        "3 distinct sentences": sum(_are_distinct(values, similarity) for values in answers) / len(answers),
        "end at a word": sum(ends_at_word(value) for _, value in sentences) / len(sentences),
        "repetition loops": sum(rejection_reason(value, context) is not None for context, value in sentences),
        "with top-up branches": sum(line.get("top_ups", 0) > 0 for line in logged) / len(logged),
        "words": sum(len(value.split()) for _, value in sentences) / len(sentences),
        "selection p50 ms": percentile(added_ms, 0.5),
        "selection p99 ms": percentile(added_ms, 0.99),
        **latency_figures([done.ms for done in exchanges]),
    }
    return [Part(part="distinct", what=f"temperature {TEMPERATURE:g}", figures=figures)]


def _are_distinct(sentences: list[str], similarity: float) -> bool:
    return len(sentences) == NUM_SENTENCES and not any(
        is_alike(one, other, similarity) for one in sentences for other in sentences if one is not other
    )
