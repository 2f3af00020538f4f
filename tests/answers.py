"""Records what seeded requests of every dialect are answered, or compares it with an earlier record.

    python -m tests.answers build/answers.json [--root FOLDER]

The first run writes the file; a later one, as after a change that must not change a text, names what differs and then
fails. Each run serves the embedded checkpoint from the checkout in FOLDER (default: this one).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.container import Container
from tests.e2e.harness import ROOT, Tercet, serving, until

DIALECTS = ("own", "jobs", "OpenAI", "TGI", "SageMaker")
NUM_REQUESTS = 200  # of each dialect
TEXT = "\n".join(path.read_text() for path in sorted((ROOT / "tests/bench/quality/texts/letters").iterdir()))
# What differs from run to run, and what depends on where a request was computed.
VOLATILE = {"id", "created", "time", "slot", "cached_tokens", "queue_ms", "prefill_ms", "decode_ms"} | {
    *("prompt_tokens_details", "created_at", "expires_at", "started_at", "finished_at")
}
Json = dict[str, Any]
Choose = Callable[..., Any]

SHARED: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.3, 0.8, 1, 1.7),
    "top_k": (-1, 0, 1, 7, 50, 100_000),
    "top_p": (0, 0.3, 0.9, 1),
    "min_p": (0, 0.05, 0.4),
    "repetition_penalty": (0.9, 1, 1.3),
}
PENALTIES = {"frequency_penalty": (-0.5, 0, 1.5)}
OWN = {
    **SHARED,
    "length": (1, 6, 20, 33),
    "strategy": ("sample", "sample", "idea", "predict"),
    "stop": ([], ["."], [" the", "\n"]),
    "single_line": (True, False),
    "clean": (True, False),
    "min_probability": (0, 0.2),
    "max_tokens": (-1, 1, 16, 64),
    "familiar_only": (True, False),
    "explain": (1, 3),
    "suffix": ("", " and went home.", None),
}
OPENAI = {
    **SHARED,
    **PENALTIES,
    "presence_penalty": (-0.5, 0, 1.5),
    "logit_bias": ({}, {"262": -100, "290": 5}, [[11, 3.5], [13, False]]),
    "temperature": (0, 0.3, 0.8, 1, 1.7),
    "max_tokens": (0, 1, 12, 24),
    "n": (1, 2, 3),
    "best_of": (0, 3),
    "logprobs": (0, 2, True, False),
    "echo": (True, False),
    "stop": ("", ".", [" the", "\n"]),
    "suffix": ("", "", " and went home."),
    "clean": (False, False, False, True),
    "single_line": (True, False),
    "truncate_prompt_tokens": (-1, 8),
    "repeat_penalty": (1, 1.2),
}
HUGGING_FACE = {
    **SHARED,
    **PENALTIES,
    "best_of": (0, 1, 3),
    "num_return_sequences": (1, 2),
    "do_sample": (True, False),
    "max_new_tokens": (1, 12, 24),
    "max_length": (0, 30, 60),
    "return_full_text": (True, False),
    "stop": ("", ".", [" the"]),
    "stop_sequences": ([], ["\n"]),
    "truncate": (0, 8),
    "details": (True, False),
    "decoder_input_details": (True, False),
    "top_n_tokens": (0, 2),
    "clean": (False, False, True),
    "n": (1, 3),
}


def requests(dialect: str) -> Iterator[tuple[str, Json]]:
    """The path and the body of each request of a dialect."""
    chance = random.Random(dialect)

    def some(fields: dict[str, tuple[Any, ...]]) -> Json:
        names = chance.sample(sorted(fields), chance.randint(0, 6))
        return {"seed": chance.randrange(2**40), **{name: chance.choice(fields[name]) for name in names}}

    def text() -> str:
        begin = chance.randrange(len(TEXT) - 400)
        return TEXT[begin : begin + chance.randint(5, 400)]

    def texts() -> str | list[str]:
        return text() if chance.random() < 0.8 else [text(), text()]

    for _ in range(NUM_REQUESTS):
        match dialect:
            case "own":
                yield "/autocomplete", {"context": text(), "corrections": chance.random() < 0.3, **some(OWN)}
            case "jobs":
                names = chance.choice([("context", "n_samples", "top_k"), ("prompt", "num_samples", "top_n")])
                fields = {names[1]: chance.randint(1, 3), names[2]: chance.choice(SHARED["top_k"]), **some(OWN)}
                fields.pop("top_k" if "top_n" in fields else "", None)
                yield "/jobs", {names[0]: text(), **fields}
            case "OpenAI":
                ids = [chance.randrange(1000) for _ in range(9)]
                yield "/v1/completions", {"prompt": chance.choice([texts(), ids]), **some(OPENAI)}
            case "TGI":
                path = chance.choice(["/generate", "/", "/generate_stream"])
                yield (
                    path,
                    {"inputs": text() if path == "/generate_stream" else texts(), "parameters": some(HUGGING_FACE)},
                )
            case "SageMaker":
                own = {"context": text(), **some(OWN)}
                openai = {"prompt": texts(), **some(OPENAI)}
                jumpstart = {"text_inputs": texts(), **some(HUGGING_FACE)}
                hugging_face = {"inputs": texts(), "parameters": some(HUGGING_FACE)}
                yield "/invocations", chance.choice([own, openai, jumpstart, jumpstart, hugging_face])


def answer(client: httpx.Client, path: str, body: Json) -> Any:
    """The status and what stays the same of the answer; of a job, those of its result."""
    try:
        response = client.post(path, json=body)
    except httpx.TransportError:  # on a busy machine, a client may read too slowly for the server
        response = client.post(path, json=body)
    if path == "/jobs" and response.status_code < 300:
        warnings = response.json().get("warnings", [])
        where = response.headers["Location"]
        job = until(
            lambda: (found := client.get(where).json())["state"] in {"succeeded", "failed"} and found, 120, where
        )
        return [job["state"], warnings, stable(job.get("result", job.get("error")))]
    if response.headers["Content-Type"].startswith("text/event-stream"):
        events = [json.loads(line[5:]) for line in response.text.splitlines() if line.startswith("data:{")]
        return [response.status_code, stable(events)]
    return [response.status_code, stable(response.json())]


def stable(value: Any) -> Any:
    if isinstance(value, list):
        return [stable(item) for item in value]
    if isinstance(value, dict):
        return {name: stable(item) for name, item in value.items() if name not in VOLATILE}
    return value


def answers(root: Path) -> dict[str, list[Any]]:
    """All answers of a checkout, by dialect."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        instance = Tercet(Path(folder) / "server", timeout_s="55", min_usefulness="0")
        # SageMaker's server has no other routes.
        for tercet, dialects in ((instance, DIALECTS[:-1]), (Container(Path(folder) / "container"), DIALECTS[-1:])):
            tercet.root = root
            with serving(tercet), _client(tercet) as client, ThreadPoolExecutor(4) as pool:
                ask = partial(answer, client)
                for dialect in dialects:
                    found[dialect] = list(pool.map(ask, *zip(*requests(dialect), strict=True)))
    return found


def _client(tercet: Tercet) -> httpx.Client:
    # A connection that waits for its next request may be closed meanwhile.
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=tercet.url, trust_env=False, timeout=60, limits=limits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args()
    found = answers(options.root.resolve())
    if not options.file.exists():
        options.file.write_text(json.dumps(found))
        sys.stdout.write(f"{sum(map(len, found.values()))} answers are in {options.file}.\n")
        return 0
    earlier = json.loads(options.file.read_text())
    different = [
        (dialect, request, before, now)
        for dialect in DIALECTS
        for request, before, now in zip(requests(dialect), earlier[dialect], found[dialect], strict=True)
        if before != json.loads(json.dumps(now))
    ]
    for dialect, request, before, now in different:
        sys.stdout.write(f"{dialect}: {request}\n  before {before}\n  now    {now}\n")
    sys.stdout.write(f"{len(different)} of {sum(map(len, found.values()))} answers differ.\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
