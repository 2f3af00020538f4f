"""R24, R25: two gateways on one pool of workers: a gateway killed, and their shared store killed."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from shared.api_keys import new_key
from tests.chaos.http_client import Endpoint, request_bytes
from tests.chaos.load import Load, count_failures, milliseconds
from tests.chaos.measure import Context, Findings
from tests.e2e.gateways import running_gateways, wait_until_ready
from tests.e2e.harness import Tercet, metric, until
from tests.e2e.remote_pool import Gateway
from tests.gateway.jobs.servers import RedisServer, find_redis, volatile_redis
from tests.nginx import nginx

NUM_CLIENTS = 3
# Uses of 20 answers, five each, that may fall back although the store is there: none is promised
# to be in time.
MAX_LATE_USES = 10
# nginx tries a gateway again after a second.
QUICK_RETURN = {"fail_timeout=5s": "fail_timeout=1s"}


@dataclass(frozen=True)
class Pair:
    """Two gateways that share a store, behind nginx."""

    gateways: list[Gateway]
    redis: RedisServer
    endpoint: Endpoint
    key: str

    def load(self, seed: int) -> Load:
        """Requests of an editor, each with a session of its own, so that both gateways get some."""

        def request(rng: random.Random) -> bytes:
            body = {"context": f"She opened door {rng.randrange(10**6)}, and", "length": 12}
            headers = {"X-Session-Id": f"s{rng.randrange(10**9)}", "x-api-key": self.key}
            return request_bytes("POST", "/autocomplete", json.dumps(body).encode(), headers)

        return Load(self.endpoint, NUM_CLIENTS, seed=seed, make_request=request)


@contextmanager
def _pair(base: Path) -> Iterator[Pair]:
    # Limits that no request reaches, so that each use of the store is measured.
    key_file = base / "keys"
    key = new_key(key_file, "load", rate=1_000_000, concurrency=1000)[0]
    with volatile_redis(base) as redis:
        settings = {"keys": str(key_file), "api_key": key, "redis": redis.url}
        with (
            running_gateways(base, {"a": settings, "b": settings}, step_delay_ms=0, max_batch=16) as (_, gateways),
            nginx(base, [gateway.port for gateway in gateways.values()], QUICK_RETURN) as port,
        ):
            for gateway in gateways.values():
                gateway.client.headers["x-api-key"] = key  # for its metrics
            yield Pair(list(gateways.values()), redis, Endpoint(port), key)


def _shared_pair(context: Context, findings: Findings) -> Pair | None:
    for name, path in (("nginx", shutil.which("nginx")), ("redis-server", find_redis())):
        findings.require(path is not None, f"{name} is not installed")
    return None if findings.shortfalls else context.entered("pair of gateways", lambda: _pair(context.directory()))


def _num_answers(gateway: Tercet) -> float:
    return metric(gateway, 'tercet_requests_total{route="/autocomplete",status="200"}')


def kill_gateways(context: Context, findings: Findings) -> None:
    """R24. All processes of a gateway are killed at once; it is started again, and takes its part again."""
    pair = _shared_pair(context, findings)
    if pair is None:
        return
    rng = random.Random(context.seed)
    num_kills = context.amount(1, 10)
    load = pair.load(context.seed)
    num_lost = 0
    with load.running():
        for number in range(num_kills):
            gateway, other = pair.gateways if number % 2 == 0 else reversed(pair.gateways)
            load.wait_for(10)
            time.sleep(rng.uniform(0, 0.1))
            family = [psutil.Process(gateway.process.pid)]
            for process in (*family, *family[0].children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            gateway.process.wait()
            before = _num_answers(other)
            load.wait_for(20)
            num_lost += not _num_answers(other) > before
            gateway.start()
            wait_until_ready(gateway)
            until(partial(_num_answers, gateway), 20, "the gateway that was killed answers requests again")
        load.wait_for(10)
    findings.figures |= {"kills": num_kills, "answers": len(load.answers), "p99 ms": milliseconds(load.answers, 0.99)}
    findings.none_of("failed requests", dict(count_failures(load.answers)))
    findings.at_most("kills without an answer of the other gateway", num_lost, 0)


def kill_the_shared_store(context: Context, findings: Findings) -> None:
    """R25. Meanwhile each gateway answers from what it knows by itself."""
    pair = _shared_pair(context, findings)
    if pair is None:
        return
    num_kills = context.amount(1, 10)
    load = pair.load(context.seed)
    calm = pair.load(context.seed + 1)
    with calm.running():
        calm.wait_for(20)
    num_failures = _num_failures(pair)
    with load.running():
        for _ in range(num_kills):
            load.wait_for(10)
            pair.redis.kill()
            fallen_back = _num_failures(pair)
            load.wait_for(20)
            findings.require(_num_failures(pair) > fallen_back, "no use of the store fell back while it was away")
            pair.redis.start()
            until(partial(_is_reached, pair), 10, "the gateways reach the store again")
            fallen_back = _num_failures(pair)
            load.wait_for(20)
            num_late = _num_failures(pair) - fallen_back
            findings.require(num_late <= MAX_LATE_USES, f"{num_late:.0f} uses fell back with the store there")
    findings.figures |= {
        "kills": num_kills,
        "answers": len(load.answers),
        "uses that fell back": _num_failures(pair) - num_failures,
        "log lines of losses": sum(len(gateway.events("redis_lost")) for gateway in pair.gateways),
        "calm p99 ms": milliseconds(calm.answers, 0.99),
        "p99 ms": milliseconds(load.answers, 0.99),
    }
    findings.none_of("failed requests", dict(count_failures(load.answers)))


def _is_reached(pair: Pair) -> bool:
    return all(len(each.events("redis_reached")) == len(each.events("redis_lost")) > 0 for each in pair.gateways)


def _num_failures(pair: Pair) -> float:
    return sum(metric(gateway, "tercet_redis_failures_total") for gateway in pair.gateways)
