"""The quality part of `writer`, `distinct`: whether a request gets three whole sentences that differ.

Judges the sentences with the similarity and repetition rules of the gateway, which also selects by them; whether a
sentence ends at a word is judged independently.
"""

from __future__ import annotations

import random

from deploy.load.rounds import percentile
from deploy.load.run import progress
from gateway.generation.trimming import is_alike, rejection_reason
from shared.settings import Settings
from tests.bench.speed.writer_session import Part, WriterSession, ends_at_word, latency_figures, read_body

NUM_CONTEXTS = 500
TEMPERATURE = 0.8
NUM_SENTENCES = 3

# Headings whose figures are shares.
PERCENTAGES = frozenset({"3 distinct sentences", "end at a word", "with top-up branches"})


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
    answers = [[sentence["value"] for sentence in read_body(done).get("sentences", [])] for done in exchanges]
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
