"""R11, R22, S13: many clients that hold connections, directly and through nginx."""

from __future__ import annotations

import itertools
import resource
import time

from tests.chaos.http_client import Endpoint
from tests.chaos.instance import end, endpoint_of, make_tercet, serving, start
from tests.chaos.load import Load, count_failures, milliseconds
from tests.chaos.measure import Context, Findings
from tests.chaos.slow_clients import Kind, SlowClients
from tests.e2e.harness import Tercet
from tests.nginx import nginx

NUM_OTHERS = 4
NUM_DRIPPING, NUM_UNREAD = 300, 230
CALM_S = 4.0


def measure_others(
    endpoint: Endpoint, slow: SlowClients, seconds: float, seed: int, name: str, findings: Findings
) -> None:
    """Normal clients without and with the slow ones: their p99 may double, none may fail. Leaves the slow ones running
    for the caller, who has to be inside `slow.running()`."""
    others = Load(endpoint, NUM_OTHERS, seed=seed + 1).run_for(seconds)
    findings.none_of(f"{name}: failed requests of others", dict(count_failures(others)))
    findings.figures[f"{name}: answers to others"] = len(others)
    findings.figures[f"{name}: slow clients connected"] = slow.num_connected
    findings.figures[f"{name}: closed by the server"] = slow.counts["closed by the server"]
    findings.at_most(
        f"{name}: others' p99 ms", milliseconds(others, 0.99), 2 * float(findings.figures[f"{name}: calm p99 ms"])
    )


def measure_calm(endpoint: Endpoint, seed: int, name: str, findings: Findings) -> None:
    Load(endpoint, NUM_OTHERS, seed=seed).run_for(1.0)
    calm = Load(endpoint, NUM_OTHERS, seed=seed).run_for(CALM_S)
    findings.none_of(f"{name}: failed requests without slow clients", dict(count_failures(calm)))
    findings.figures[f"{name}: calm p99 ms"] = milliseconds(calm, 0.99)


def survive_slow_clients(context: Context, findings: Findings) -> None:
    """S13, over HTTP and over TLS. The stop is compared with one of the same instance without slow clients."""
    raise_own_descriptor_limit()
    seconds = context.amount(5, 30)  # for each of the two
    for name, certificate in (("HTTP", None), ("TLS", context.certificate)):
        tercet = make_tercet(context.directory(), certificate, models="embedded*2")
        endpoint = endpoint_of(tercet, certificate)
        dripping: list[Kind] = ["head", "body"] if certificate is None else ["head", "body", "handshake", "idle"]
        kinds: list[Kind] = [kind for kind, _ in zip(itertools.cycle(dripping), range(NUM_DRIPPING), strict=False)]
        kinds += ["unread"] * NUM_UNREAD
        try:
            start(tercet)
            findings.figures[f"{name}: stop without slow clients s"] = calm_s = stop_s(tercet)
            tercet = make_tercet(context.directory(), certificate, models="embedded*2")
            endpoint = endpoint_of(tercet, certificate)
            start(tercet)
            measure_calm(endpoint, context.seed, name, findings)
            with SlowClients([(endpoint, kind) for kind in kinds], context.seed).running() as slow:
                measure_others(endpoint, slow, seconds, context.seed, name, findings)
                findings.at_most(f"{name}: stop s", stop_s(tercet), calm_s + 1.0)
        finally:
            end(tercet)


def stop_s(tercet: Tercet) -> float:
    """Stop by TERM; how long it took."""
    began_at = time.monotonic()
    tercet.process.terminate()
    tercet.process.wait(timeout=60)
    return time.monotonic() - began_at


def serve_with_few_descriptors(context: Context, findings: Findings) -> None:
    """R22. More idle connections than descriptors; the limit is soft and hard, so that it cannot be raised."""
    raise_own_descriptor_limit()
    num_rounds = context.amount(1, 10)
    for limit, num_idle in ((1024, 1150), (128, 300)):
        name = f"{limit} descriptors"
        with serving(context.directory(), None, max_descriptors=limit, models="embedded*2") as tercet:
            endpoint = endpoint_of(tercet)
            before = [process.pid for process in tercet.processes()["gateway"]]
            with Load(endpoint, NUM_OTHERS, seed=context.seed).running() as load:
                for turn in range(num_rounds):
                    load.wait_for(10)
                    with SlowClients([(endpoint, "idle")] * num_idle, context.seed + turn).running():
                        load.wait_for(30)
            findings.figures |= {f"{name}: idle connections": num_idle, f"{name}: answers": len(load.answers)}
            findings.none_of(f"{name}: failed requests", dict(count_failures(load.answers)))
            after = [process.pid for process in tercet.processes()["gateway"]]
            findings.require(before == after, f"{name}: the gateway's processes {before} became {after}")


def survive_slow_clients_behind_nginx(context: Context, findings: Findings) -> None:
    """R11. The slow clients have addresses of their own, as others' limits are per address."""
    raise_own_descriptor_limit()
    tercet, _ = context.shared()
    with nginx(context.directory(), tercet.port) as port:
        kinds = itertools.cycle(("head", "body", "reading"))
        clients: list[tuple[Endpoint, Kind]] = [
            (Endpoint(port, source=f"127.0.{1 + number // 200}.{1 + number % 200}"), kind)  # type: ignore[misc]
            for number, kind in zip(range(500), kinds, strict=False)
        ]
        endpoint = Endpoint(port)
        measure_calm(endpoint, context.seed, "nginx", findings)
        with SlowClients(clients, context.seed).running() as slow:
            measure_others(endpoint, slow, context.amount(5, 60), context.seed, "nginx", findings)


def raise_own_descriptor_limit() -> None:
    """Raise the limit for this process's clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
