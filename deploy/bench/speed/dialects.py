"""The part `dialects` of `tercet bench writer`: what a completions dialect adds to the latency of `/autocomplete`.

A writer types a document of 300 words; at the end of each word the same completion is streamed through each dialect, in
turns whose order rotates. All requests of a word have the same prompt, seed and sampling parameters, so the engine
computes the same tokens, and a request before them fills the prefix cache. Knows the dialects' request bodies, not
their answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from statistics import median

from deploy.bench.harness.writer import Part, WriterSession, latency_figures
from deploy.load.clients import Body
from deploy.load.run import progress
from deploy.load.workload import W
from shared.errors import StartError

NUM_DOCUMENT_WORDS = 300
# More than the document has, so that no dialect cuts its prompt.
MAX_PROMPT_TOKENS = 1000
REFERENCE = "/autocomplete"
MakeBody = Callable[[str, int], Body]


def _autocomplete(text: str, seed: int) -> Body:
    return {**W.body(text, seed), "n_samples": 1, "max_tokens": MAX_PROMPT_TOKENS, "clean": False, "stream": True}


def _openai(text: str, seed: int) -> Body:
    sampling = {"temperature": W.temperature, "top_k": W.top_k, "top_p": W.top_p}
    return {"prompt": text, "max_tokens": W.num_new_tokens, "seed": seed, "stream": True, **sampling}


def _tgi(text: str, seed: int) -> Body:
    sampling = {"temperature": W.temperature, "top_k": W.top_k, "top_p": W.top_p, "do_sample": True}
    return {"inputs": text, "parameters": {"max_new_tokens": W.num_new_tokens, "seed": seed, **sampling}}


BODIES: Mapping[str, MakeBody] = {
    REFERENCE: _autocomplete,
    "/v1/completions": _openai,
    "/generate_stream": _tgi,
}


def measure_dialects(session: WriterSession) -> list[Part]:
    """A row for each dialect.

    Raises:
        StartError: a request failed, so its time means nothing.
    """
    texts = session.words(session.num_repeats(NUM_DOCUMENT_WORDS), random.Random(5))
    samples_ms: dict[str, list[float]] = {path: [] for path in BODIES}
    with progress(session.console, "Dialects", len(texts)) as turn:
        for number, text in enumerate(texts):
            turn("a word")
            session.request(text, n_samples=1, length=1, max_tokens=MAX_PROMPT_TOKENS, clean=False)
            paths = list(BODIES)
            for path in paths[number % len(paths) :] + paths[: number % len(paths)]:
                done = session.post(path, BODIES[path](text, number))
                if done.status != 200:
                    raise StartError(f"{path} answered with status {done.status} (0: connection lost).")
                samples_ms[path].append(done.ms)
    return [
        Part(
            part="dialects",
            what=path,
            figures={
                **latency_figures(values),
                "added p50 ms": median(a - b for a, b in zip(values, samples_ms[REFERENCE], strict=True)),
            },
        )
        for path, values in samples_ms.items()
    ]
