"""R29: workers that answer anything."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import msgspec
import psutil

from shared.masters.run_directory import prepare_run_directory
from shared.plan import Plan, Slot, plan_inputs, read_plan, write_plan
from shared.protocol import State
from shared.settings import Settings
from tests.chaos.http_client import Answer, exchange, find_fault, request_bytes
from tests.chaos.liar import LIES, STATE_LIES, Lie, LyingWorker, fuzzed
from tests.chaos.measure import Context, Findings, Jitter
from tests.e2e.harness import Gunicorn, Tercet, serving, until

LIMIT_S = 2.0
CONTEXT = "The old man looked at the sea and"
# Of each dialect, what shows most of a worker's answer.
REQUESTS = [
    request_bytes("POST", path, json.dumps(body).encode())
    for path, body in (
        ("/autocomplete", {"context": CONTEXT, "length": 5}),
        ("/autocomplete", {"context": CONTEXT, "length": 5, "stream": True, "explain": 3}),
        ("/v1/completions", {"prompt": CONTEXT, "max_tokens": 5, "echo": True, "logprobs": 2, "n": 2}),
        ("/generate", {"inputs": CONTEXT, "parameters": {"max_new_tokens": 5, "details": True}}),
    )
]
WARM = State(state="warm", ms_per_token=0.001, max_batch=48, pid=1)  # so fast that it is preferred


def distrust_liars(context: Context, findings: Findings) -> None:
    """R29. Each lie by a worker of its own, one after the other, and then changed bytes by all of them together."""
    with _serving_beside_liars(context) as (gateway, liars), Jitter().running() as jitter:
        [process] = psutil.Process(gateway.process.pid).children()
        answers = [_ask(gateway, index) for index in range(2 * len(REQUESTS))]
        memory_before = process.memory_info().rss
        peak = 0
        distrusted: list[bool] = []
        revision = gateway.slots()[-1]["revision"]
        for index, liar in enumerate(liars):
            # Half of them say that they have the weights of the other slot.
            liar.state = msgspec.structs.replace(WARM, revision=revision if index % 2 else "")
            until(partial(_is_in_use, gateway, index, liar), 10, "the slot is in use")
            for _ in REQUESTS:
                answers.append(_ask(gateway, len(answers)))
                peak = max(peak, process.memory_info().rss)
            distrusted.append(_state(gateway, index) == "down")
            liar.state = State(state="loading")
        findings.require(all(liar.num_lies for liar in liars), "a worker was not asked")
        whole = sum(answer.status == 200 for answer in answers)
        findings.require(whole == len(answers), f"{len(answers) - whole} requests failed beside one liar")
        findings.require(all(distrusted), f"{distrusted.count(False)} liars were trusted on")
        seconds, fuzzed_from = context.amount(3, 60), len(answers)
        for liar in liars:
            liar.state = WARM
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            answers.append(_ask(gateway, len(answers)))
            peak = max(peak, process.memory_info().rss)
        labels = _outcomes(gateway)
        events = gateway.events("unhandled_exception")
    findings.figures |= {
        "kinds of lies": len(liars),
        "lies": sum(liar.num_lies for liar in liars),
        "answers": len(answers),
        "whole answers among several liars": sum(answer.status == 200 for answer in answers[fuzzed_from:]),
        "machine's jitter p99 ms": jitter.ms(0.99),
    }
    faults = Counter(fault for answer in answers if answer.status == 0 and (fault := find_fault(answer)))
    findings.none_of("lost answers", dict(faults))
    findings.none_of("unhandled exceptions", dict(Counter(str(event.get("exception"))[-80:] for event in events)))
    late_ms = 1e3 * (max(answer.seconds for answer in answers) - LIMIT_S)
    findings.at_most("past the deadline, max ms", late_ms, 100.0 + jitter.ms(0.99))
    findings.at_most("the gateway's memory grew, MB", max(0, peak - memory_before) / 1e6, 16.0)
    findings.at_most("outcomes in metrics", len(labels), 20)


@contextmanager
def _serving_beside_liars(context: Context) -> Iterator[tuple[Tercet, list[LyingWorker]]]:
    """A gateway with a slot for each lie, which loads at first, and a last slot, of the embedded checkpoint."""
    # The batch is what the retries of ten seconds are counted by; each liar costs some.
    base, settings = context.directory(), {"models": "embedded", "timeout_s": f"{LIMIT_S:g}", "max_batch": "256"}
    gateway = Gunicorn(base / "gateway", "gateway", **settings)
    with ExitStack() as stack:
        pool = stack.enter_context(serving(Gunicorn(base / "pool", "workers", **settings)))
        plan = read_plan(pool.run_dir)
        [honest] = plan.slots
        liars, slots = [], []
        for index, name in enumerate([*LIES, *STATE_LIES]):
            path = base / f"liar-{index}.sock"
            choose = _chooser(name)
            liar = LyingWorker(path, choose, STATE_LIES.get(name, b""), seed=context.seed + index)
            stack.callback(liar.close)
            liars.append(liar)
            slots.append(Slot(index, "cpu", honest.model, str(path), honest.max_batch))
        slots.append(msgspec.structs.replace(honest, index=len(slots)))
        loaded = Settings.load(gateway.environ)
        write_plan(Plan(plan_inputs(loaded, gateway.environ), plan.models, slots), prepare_run_directory(loaded))
        stack.enter_context(serving(gateway))
        until(lambda: _state(gateway, len(liars)) == "warm", 60, "the slot that tells the truth is warm")
        yield gateway, liars


def _chooser(name: str) -> Callable[[random.Random], Lie]:
    """The lie of this name at first, then changed bytes."""
    first = iter([LIES[name]] * 3 if name in LIES else [])
    return lambda _rng: next(first, fuzzed)


def _is_in_use(gateway: Tercet, index: int, liar: LyingWorker) -> bool:
    return liar.num_lies > 0 or _state(gateway, index) == "warm"


def _state(gateway: Tercet, index: int) -> str:
    return str(gateway.slots()[index]["state"])


def _ask(gateway: Tercet, number: int) -> Answer:
    return exchange(gateway.port, REQUESTS[number % len(REQUESTS)])


def _outcomes(gateway: Tercet) -> set[str]:
    """The values of the label `outcome` of `tercet_branches`."""
    lines = gateway.client.get("/metrics").text.splitlines()
    return {line.partition('outcome="')[2].partition('"')[0] for line in lines if line.startswith("tercet_branches")}
