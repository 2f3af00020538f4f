"""R11, S13: clients that drip what they send, or never read, through nginx and directly."""

from __future__ import annotations

import itertools
import resource
import ssl
import time
from collections.abc import Callable

from tests.chaos.load import Load, count_failures, milliseconds
from tests.chaos.measure import Context, Findings
from tests.chaos.slow_clients import Kind, SlowClients
from tests.e2e.harness import Tercet, running
from tests.nginx import nginx
from tests.tls import Certificate

NUM_OTHERS = 4
NUM_BEHIND_NGINX, NUM_DRIPPING, NUM_UNREAD = 500, 300, 230
CALM_S = 4.0
# A server looks at the deadlines of a stop four times a second.
STOP_TOLERANCE_S = 0.3


def survive_slow_clients_behind_nginx(context: Context, findings: Findings) -> None:
    """R11."""
    kinds = _cycled(("head", "body", "reading"), NUM_BEHIND_NGINX)
    with nginx(context.directory(), context.shared().port) as port:
        _measure_others(port, None, kinds, context.amount(5, 60), context.seed, "nginx", findings)


def survive_slow_clients(context: Context, findings: Findings) -> None:
    """S13, over HTTP and over TLS. The stop is compared with one while idle clients are connected, as browsers are."""
    for name, certificate in (("HTTP", None), ("TLS", Certificate(context.directory()))):
        dripping: tuple[Kind, ...] = ("head", "body", "handshake", "idle") if certificate else ("head", "body")
        kinds = [*_cycled(dripping, NUM_DRIPPING), *_cycled(("unread",), NUM_UNREAD)]
        tls = certificate.client() if certificate else None
        with (
            running(context.directory(), certificate, models="embedded*2") as tercet,
            SlowClients(tercet.port, tls, ["idle"] * NUM_OTHERS, context.seed).running(),
        ):
            calm_s = _stop_s(tercet)
        findings.figures[f"{name}: stop with idle clients s"] = calm_s
        with running(context.directory(), certificate, models="embedded*2") as tercet:

            def stop(tercet: Tercet = tercet, name: str = name, calm_s: float = calm_s) -> None:
                findings.at_most(f"{name}: stop s", _stop_s(tercet), calm_s + STOP_TOLERANCE_S, is_speed=True)

            _measure_others(tercet.port, tls, kinds, context.amount(5, 30), context.seed, name, findings, stop)


def _measure_others(
    port: int,
    tls: ssl.SSLContext | None,
    kinds: list[Kind],
    seconds: float,
    seed: int,
    name: str,
    findings: Findings,
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Normal clients without and with the slow ones: their p99 may double, none may fail.

    Args:
        at_end: called while the slow clients are still connected.
    """
    _raise_own_descriptor_limit()
    Load(port, NUM_OTHERS, seed=seed, tls=tls).run_for(1.0)
    calm = Load(port, NUM_OTHERS, seed=seed, tls=tls).run_for(CALM_S)
    calm_p99_ms = milliseconds(calm, 0.99)
    findings.none_of(f"{name}: failed requests without slow clients", count_failures(calm))
    with SlowClients(port, tls, kinds, seed).running() as slow:
        others = Load(port, NUM_OTHERS, seed=seed + 1, tls=tls).run_for(seconds)
        findings.none_of(f"{name}: failed requests of others", count_failures(others))
        findings.figures |= {
            f"{name}: answers to others": len(others),
            f"{name}: slow clients connected": slow.num_connected,
            f"{name}: closed by the server": slow.counts["closed by the server"],
            f"{name}: calm p99 ms": calm_p99_ms,
        }
        findings.at_most(f"{name}: others' p99 ms", milliseconds(others, 0.99), 2 * calm_p99_ms)
        at_end()


def _cycled(kinds: tuple[Kind, ...], number: int) -> list[Kind]:
    return [kind for kind, _ in zip(itertools.cycle(kinds), range(number), strict=False)]


def _stop_s(tercet: Tercet) -> float:
    """Stop by TERM; how long it took."""
    began_at = time.monotonic()
    tercet.process.terminate()
    tercet.process.wait(timeout=60)
    return time.monotonic() - began_at


def _raise_own_descriptor_limit() -> None:
    """Raise the limit for this process's clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
