"""Records the answers to 200 seeded requests of every kind, in plain ASCII, or compares them with a record.

A change that must not alter texts is checked with it: record with one version, compare with the other, on one machine.
Times, slots and cache hits are left out; every other byte of an answer must be the same. Knows the HTTP contract only,
so that it can be pointed at any version of the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from deploy.tuning.load.server import ROOT
from shared.errors import StartError

PROSE = ROOT / "workers" / "checkpoints" / "page.txt"
NUM_REQUESTS = 200
# What depends on when and where a branch ran.
VARYING = frozenset(
    {"id", "time", "slot", "cached_tokens", "queue_ms", "prefill_ms", "decode_ms", "detail", "request_id"}
)
_SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {}),
    ("streamed", {"stream": True}),
    ("explained", {"explain": 3}),
    ("greedy", {"temperature": 0}),
    ("stopped", {"stop": [".", " and"], "length": 40}),
    ("single line", {"single_line": True, "length": 48}),
    ("penalised", {"repetition_penalty": 1.4}),
    ("hot, whole vocabulary", {"temperature": 1.6, "top_k": 0, "top_p": 1}),
    ("top-p alone", {"top_k": 0, "top_p": 0.7}),
    ("many candidates", {"top_k": 200}),
    ("short", {"length": 3}),
    ("one sample, long", {"n": 1, "length": 90}),
    ("eight samples", {"n": 8, "length": 12}),
    ("short window", {"max_tokens": 24}),
    ("greedy, explained, streamed", {"temperature": 0, "explain": 2, "stream": True}),
    ("streamed and stopped", {"stream": True, "stop": [","], "repetition_penalty": 1.2}),
)
Request = tuple[str, dict[str, Any]]  # its kind and its body
# How a context ends: at a word's end, in a word, in a space, after a mark, in a new line.
_CUTS = (0, 3, 1, 0, 2, 5)


def requests(prose: str, models: list[str], number: int = NUM_REQUESTS) -> list[Request]:
    """The requests, the same for the same arguments.

    Args:
        prose: where contexts are taken from, at least some thousand characters.
    """
    made = []
    for index in range(number):
        kind, fields = _SHAPES[index % len(_SHAPES)]
        model = models[index // len(_SHAPES) % len(models)]
        body = {"context": _context(prose, index), "seed": 1000 * index + 7, "model_size": model, **fields}
        made.append((f"{kind} ({model})", body))
    return made


def _context(prose: str, index: int) -> str:
    if index % 29 == 0:
        return ""
    length = (40, 160, 700, 2500)[index % 4]
    start = 97 * index % max(1, len(prose) - length)
    text = prose[start : start + length]
    end = text.rfind(" ") + _CUTS[index % len(_CUTS)]
    suffix = ("", "", "\n\n", ' -- "', "e ", "")[index % 6] if index % 7 == 0 else ""
    return text[: max(1, end)] + suffix


def answers(url: str, wanted: list[Request]) -> Iterator[dict[str, Any]]:
    """What the server answers, without what varies.

    Raises:
        StartError: no server answers at `url`.
    """
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as client:
        for kind, body in track(wanted, description="Requests", console=Console(stderr=True)):
            try:
                response = client.post("/autocomplete", json=body)
            except httpx.TransportError as error:
                raise StartError(f"No answer from {url} ({error}): start a server there.") from error
            answer = _streamed(response.text) if body.get("stream") else response.json()
            yield {"kind": kind, "body": body, "status": response.status_code, "answer": _fixed(answer)}


def _streamed(text: str) -> dict[str, Any]:
    """A stream's texts by branch, its sentences and its last event. How tokens are grouped into events varies."""
    result: dict[str, Any] = {"sentences": [], "texts": {}}
    for event in filter(None, text.split("\n\n")):
        name, data = (line.partition(": ")[2] for line in event.split("\n"))
        value = json.loads(data)
        if name == "token":
            result["texts"][str(value["branch"])] = result["texts"].get(str(value["branch"]), "") + value["text"]
        elif name == "sentence":
            result["sentences"].append(value)
        else:
            result[name] = value
    result["sentences"].sort(key=lambda sentence: sentence["branch"])
    return result


def _fixed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _fixed(item) for name, item in sorted(value.items()) if name not in VARYING}
    return [_fixed(item) for item in value] if isinstance(value, list) else value


def record(url: str, prose: str, models: list[str], path: Path) -> int:
    """Write the answers to a file, one JSON line each; how many."""
    lines = [json.dumps(answer, ensure_ascii=False) for answer in answers(url, requests(prose, models))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def differences(url: str, path: Path) -> tuple[int, list[str]]:
    """How many recorded requests were repeated, and a sentence for each answer that differs.

    Raises:
        StartError: the record cannot be read, or no server answers.
    """
    try:
        recorded = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise StartError(f"The record {path} cannot be read ({error}): remove it to record again.") from error
    wanted = [(entry["kind"], entry["body"]) for entry in recorded]
    found = []
    for number, (before, now) in enumerate(zip(recorded, answers(url, wanted), strict=True)):
        if (before["status"], before["answer"]) != (now["status"], now["answer"]):
            found.append(f"request {number}, {before['kind']}: {json.dumps(now['answer'], ensure_ascii=False)[:300]}")
    return len(recorded), found
