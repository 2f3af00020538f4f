"""R14: what grows over many requests."""

from __future__ import annotations

import json
import random
import shutil
import socket
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch

from gateway.api.feedback import MAX_ANSWERS
from tests.chaos.http_client import completion_request
from tests.chaos.load import Load, count_failures
from tests.chaos.measure import Context, Findings
from tests.e2e.harness import ROOT, Tercet, usages

EMBEDDED = ROOT / "workers/checkpoints/embedded"
NUM_CLIENTS, NUM_WARM_UP_CLIENTS = 6, 24
MAX_GROWTH_MB = 5.0
SETTLE_S = 3.0  # an engine's steps keep a thread of `faulthandler`, which ends within a quarter of `hang_s`
# Of a worker's KV cache. By default it is 30 % of the memory, taken as it is used: it would grow all the time.
CACHE_MB, MAX_BATCH = 112, 12
MAX_THREADS = MAX_BATCH + 8  # of a slot's server: WORKER_RESERVE_THREADS in gunicorn.conf.py
# Different words in the prompts: fewer than the 10,000 that `tokenizers` remembers.
NUM_WORDS = 5000


def models(context: Context) -> str:
    """Two slots. The soak's have one layer, to serve more in the time: what a leak keeps does not depend on it."""
    return f"shallow={_make_shallow(context.directory() / 'shallow')}*2" if context.size == "soak" else "embedded*2"


def _make_shallow(directory: Path) -> Path:
    """A copy of the embedded checkpoint, with its first layer alone."""
    shutil.copytree(EMBEDDED, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"n_layer": 1}))
    weights = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    kept = {name: tensor for name, tensor in tensors.items() if ".h." not in name or ".h.0." in name}
    safetensors.torch.save_file(kept, weights, metadata={"format": "pt"})
    return directory


def short_answers(rng: random.Random, *, session_every: int = 10) -> bytes:
    """Short, so that the machine serves many; some have three branches, a session, or a long prompt."""
    number = rng.randrange(NUM_WORDS)
    context = f"Door {number} opened, and" * (40 if number % 20 == 0 else 1)
    # Of its own: a request of a session supersedes the one before.
    more: dict[str, Any] = {"session": f"s{rng.getrandbits(62)}"} if number % session_every == 0 else {}
    return completion_request(context, length=1 + number % 2, n_samples=3 if number % 8 == 0 else 1, **more)


def start_all_threads(tercet: Tercet) -> None:
    """A slot's server starts a thread for a request while all that it has wait on connections, until it has as many as
    it may have."""
    with ExitStack() as stack:
        for slot in tercet.wait_until_warm():
            for _ in range(MAX_THREADS):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.connect(str(tercet.run_dir / f"slot-{slot['slot']}.sock"))
                sock.sendall(b"GET /health/live HTTP/1.1\r\nHost: tercet\r\n\r\n")
        time.sleep(1.0)


def hold_no_more_after_many_requests(context: Context, findings: Findings) -> None:
    """The warm-up fills the cache and what the gateway remembers of answers, and starts all threads and connections for
    more clients than come later."""
    num_requests = context.amount(1000, 20_000)
    tercet = context.shared(models=models(context), cache_mb=str(CACHE_MB), max_batch=str(MAX_BATCH))
    start_all_threads(tercet)
    with_sessions = partial(short_answers, session_every=1)  # the gateway remembers 10,000 documents
    load = Load(tercet.port, NUM_WARM_UP_CLIENTS, seed=context.seed, make_request=with_sessions)
    with load.running():
        load.wait_for(MAX_ANSWERS, 7200.0)
    more = Load(tercet.port, NUM_WARM_UP_CLIENTS, make_request=short_answers).run_for(10.0)  # more branches at once
    time.sleep(SETTLE_S)
    before = usages(tercet)
    measured = Load(tercet.port, NUM_CLIENTS, seed=context.seed + 1, make_request=short_answers)
    with measured.running():
        measured.wait_for(num_requests, 7200.0)
    time.sleep(SETTLE_S)
    after = usages(tercet)
    findings.figures |= {"requests": len(measured.answers), "after a warm-up of": len(load.answers)}
    findings.none_of("failed requests", dict(count_failures(load.answers + more + measured.answers)))
    for name, was in before.items():
        findings.at_most(f"{name}: memory growth MB", (after[name].rss_bytes - was.rss_bytes) / 1e6, MAX_GROWTH_MB)
        findings.at_most(f"{name}: descriptors grown", after[name].num_descriptors - was.num_descriptors, 0)
        findings.at_most(f"{name}: threads grown", after[name].num_threads - was.num_threads, 0)
