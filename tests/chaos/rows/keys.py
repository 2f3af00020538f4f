"""S4, S6, S14: API keys on a running instance: their limits, what stays secret, and what answers reveal."""

from __future__ import annotations

import json
import random
import re
import secrets
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scipy.stats import mannwhitneyu

from shared.api_keys import new_key
from tests.chaos.http_client import Answer, Connection, Endpoint, completion_request, find_fault, request_bytes
from tests.chaos.load import Load, count_failures, milliseconds
from tests.chaos.measure import Context, Findings
from tests.e2e.harness import Tercet, until

NUM_THREADS = 8
RATE_PER_MINUTE = 120
MAX_BATCH = 6  # so that a flood waits for many batches
BRANCHES = 3
FLOOD_CLIENTS = 60
# Below this probability two samples count as different; the guesses are decided by seed, so a repetition agrees.
SIGNIFICANCE = 1e-4


def keyed_instance(context: Context) -> tuple[Tercet, Endpoint, dict[str, str]]:
    """An instance with keys, at log level debug; the keys by name. `limited` has a rate, `flood` has no limits."""

    def make_keys() -> tuple[str, dict[str, str]]:
        path = context.directory() / "keys"
        keys = {
            "operator": new_key(path, "operator", rate=0, concurrency=0)[0],
            "limited": new_key(path, "limited", rate=RATE_PER_MINUTE)[0],
            "flood": new_key(path, "flood", rate=0, concurrency=0)[0],
            "other": new_key(path, "other", rate=0, concurrency=0)[0],
        }
        return str(path), keys

    path, keys = context.once("keys", make_keys)
    tercet, endpoint = context.shared(
        is_tls=False, keys=path, api_key=keys["operator"], log="debug", max_batch=str(MAX_BATCH)
    )
    return tercet, endpoint, keys


def limit_each_key(context: Context, findings: Findings) -> None:
    """S4. The rate from 8 threads; then a flood of one key and the latency of another.

    The other key's request may wait for one batch of a slot, and then runs in a full batch itself.
    """
    _, endpoint, keys = keyed_instance(context)
    seconds = context.amount(3, 20)
    request = completion_request("The", key=keys["limited"], length=0)  # wrong, so that it costs little, and counted
    began_at = time.monotonic()

    def take(_: int) -> list[Answer]:
        found = []
        with Connection(endpoint) as connection:
            while time.monotonic() - began_at < seconds:
                found.append(connection.exchange(request))
                time.sleep(0.005)
        return found

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        answers = [answer for found in pool.map(take, range(NUM_THREADS)) for answer in found]
    statuses = Counter(answer.status for answer in answers)
    elapsed_s = max(answer.ended_at for answer in answers) - min(answer.started_at for answer in answers)
    theory = RATE_PER_MINUTE + elapsed_s * RATE_PER_MINUTE / 60
    findings.figures |= {"taken in theory": theory, "taken": statuses[422], "refused with 429": statuses[429]}
    findings.require(set(statuses) == {422, 429}, f"statuses {dict(statuses)}")
    findings.at_most("difference from theory", abs(statuses[422] - int(theory)), 1)

    def other(seed: int) -> Load:
        key = keys["other"]
        return Load(
            endpoint, 1, seed=seed,
            make_request=lambda rng: completion_request(f"The {rng.randrange(10**6)}", key=key, length=12),
        )  # fmt: skip

    other(context.seed).run_for(1.0)
    calm = other(context.seed).run_for(context.amount(2, 8))
    flood = Load(
        endpoint, FLOOD_CLIENTS, seed=context.seed,
        make_request=lambda rng: completion_request(f"A {rng.randrange(10**6)}", key=keys["flood"], length=12),
    )  # fmt: skip
    with flood.running():
        time.sleep(0.5)
        flooded = other(context.seed + 1).run_for(context.amount(3, 15))
    served = [answer for answer in flood.answers if answer.status == 200]
    served_per_s = len(served) / (max(a.ended_at for a in served) - min(a.started_at for a in served))
    batch_ms = 1e3 * 2 * (MAX_BATCH // BRANCHES) / served_per_s
    findings.figures |= {
        "calm p99 ms": milliseconds(calm, 0.99),
        "flood: answers/s": served_per_s,
        "flood: p50 ms": milliseconds(served, 0.5),
        "flood: a batch takes ms": batch_ms,
        "other key: answers": len(flooded),
        "other key: p50 ms": milliseconds(flooded, 0.5),
    }
    findings.none_of("other key: failed requests", dict(count_failures(flooded)))
    findings.at_most("other key: p99 ms", milliseconds(flooded, 0.99), milliseconds(calm, 0.99) + 2 * batch_ms)


def keep_canaries_secret(context: Context, findings: Findings) -> None:
    """S6. Each request has prompts and keys of its own, in every place where a client can put them."""
    tercet, endpoint, keys = keyed_instance(context)
    rng = random.Random(context.seed)
    canaries: list[str] = []
    found_in_errors = Counter[str]()
    statuses = Counter[int]()
    with Connection(endpoint) as connection:
        for number in range(context.amount(100, 1000)):
            canary = f"canary{secrets.token_hex(8)}"
            canaries.append(canary)
            request = _canary_request(rng, number, canary, keys["operator"])
            if rng.random() < 0.1:
                with endpoint.connect(5.0) as client:  # a client that leaves
                    client.sendall(request[: rng.randrange(1, len(request))])
                continue
            answer = connection.exchange(request)
            statuses[answer.status] += 1
            if answer.status >= 500 or answer.status == 0:
                found_in_errors[f"status {answer.status}"] += 1
            if answer.status != 200 and canary.encode() in answer.body:
                found_in_errors[f"a canary in a {answer.status}"] += 1

    def scrape() -> str:
        return tercet.client.get("/metrics", headers={"Authorization": f"Bearer {keys['operator']}"}).text

    time.sleep(0.5)
    until(lambda: _num_open_jobs(scrape()) == 0, 60, "no job is open")
    jobs = b"".join(path.read_bytes() for path in tercet.run_dir.parent.glob("jobs.sqlite3*"))
    findings.require(statuses[202] > 0, "no request has made a job")
    places = {
        "log": tercet.log(),
        "metrics": scrape(),
        "jobs, all final": jobs.decode("latin-1"),
    }
    secret = [*canaries, *keys.values()]
    findings.figures |= {"canaries": len(canaries)} | {f"answers {status}": n for status, n in sorted(statuses.items())}
    findings.require("debug" in places["log"], "the log has no line at level debug")
    for name, text in places.items():
        findings.at_most(f"canaries and keys in {name}", sum(value in text for value in secret), 0)
    for name, path in (("plan and run directory", tercet.run_dir),):
        texts = [file.read_text(errors="replace") for file in path.iterdir() if file.is_file()]
        findings.at_most(f"canaries and keys in {name}", sum(v in text for text in texts for v in secret), 0)
    findings.none_of("errors", dict(found_in_errors))


def _num_open_jobs(metrics: str) -> float:
    """Of one gateway process, by the events that it has counted."""
    events = dict(re.findall(r'^tercet_jobs_total\{event="(\w+)"\} (\S+)$', metrics, re.MULTILINE))
    return float(events.get("queued", 0)) - sum(float(events.get(event, 0)) for event in ("succeeded", "failed"))


def _canary_request(rng: random.Random, number: int, canary: str, key: str) -> bytes:
    """A request that is right, wrong in one field, no JSON, or without a valid key."""
    fields: dict[str, Any] = {"context": f"{canary} said", "length": 1 + number % 3, "stream": number % 4 == 0}
    headers = {"Authorization": f"Bearer {key}"}
    match rng.randrange(9):
        case 0:
            fields["stop"] = [canary]
        case 1:
            fields["temperature"] = canary
        case 2:
            fields["context"] = [canary]
        case 3:
            headers = {"Authorization": f"Bearer tct_{canary}"}
        case 4:
            headers = {"X-Api-Key": canary}
        case 5:
            body = json.dumps(fields).encode()
            return request_bytes("POST", "/autocomplete", body[: rng.randrange(5, len(body))], headers)
        case 6:
            return request_bytes("POST", f"/autocomplete?prompt={canary}", json.dumps(fields).encode(), headers)
        case 7:
            headers["Prefer"] = "respond-async"
            fields["stream"] = False
    return request_bytes("POST", "/autocomplete", json.dumps(fields).encode(), headers)


def reveal_no_other_text(context: Context, findings: Findings) -> None:
    """S14. One writes a secret; another guesses it, or something else, and looks at `cached_tokens` and times.

    A victim and an attacker differ in the key, or in the session of one key. The test of the times is Mann and
    Whitney's; 0.5 is a coin's chance that a right guess looks faster than a wrong guess.
    """
    _, endpoint, keys = keyed_instance(context)
    num_guesses = context.amount(20, 1000) // 2
    for name, victim, attacker in (
        ("other key", (keys["other"], {}), (keys["operator"], {})),
        ("other session", (keys["other"], {"session": "victim"}), (keys["other"], {"session": "attacker"})),
    ):
        rng = random.Random(f"{context.seed}/{name}")
        cached: dict[bool, list[int]] = {True: [], False: []}
        times_ms: dict[bool, list[float]] = {True: [], False: []}
        faults = Counter[str]()
        with Connection(endpoint) as connection:
            for number in range(num_guesses):
                secret, wrong = (_text(rng) for _ in range(2))
                is_right = number % 2 == 0
                connection.exchange(_guess(secret, victim))
                answer = connection.exchange(_guess(secret if is_right else wrong, attacker, seed=number))
                if fault := find_fault(answer):
                    faults[fault] += 1
                    continue
                [sentence] = answer.document()["sentences"]
                # A replacement of a rejected completion finds the prompt that the guess itself has written.
                if sentence["seed"] == number:
                    cached[is_right].append(sentence["cached_tokens"])
                    times_ms[is_right].append(sentence["prefill_ms"])
        findings.none_of(f"{name}: faulty answers", dict(faults))
        findings.figures[f"{name}: guesses"] = num_guesses
        findings.at_most(f"{name}: cached tokens of right guesses", max(cached[True]), max(cached[False]))
        test = mannwhitneyu(times_ms[True], times_ms[False], alternative="less")
        findings.figures[f"{name}: median prefill ms, right"] = statistics.median(times_ms[True])
        findings.figures[f"{name}: median prefill ms, wrong"] = statistics.median(times_ms[False])
        chance = 1 - float(test.statistic) / (len(times_ms[True]) * len(times_ms[False]))
        findings.figures[f"{name}: chance that a right guess looks faster"] = chance
        findings.at_least(f"{name}: probability of these times by chance", float(test.pvalue), SIGNIFICANCE)


def _guess(text: str, who: tuple[str, dict[str, str]], seed: int = 0) -> bytes:
    key, fields = who
    return completion_request(text, key=key, length=1, n_samples=1, seed=seed, **fields)


def _text(rng: random.Random) -> str:
    """Long enough that its prefill takes measurable time."""
    return " ".join(f"word{rng.randrange(10**6)}" for _ in range(40)) + " and"
