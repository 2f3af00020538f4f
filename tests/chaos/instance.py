"""Instances of Tercet for the rows: `tests.e2e.harness` with TLS, with limits of the process, and with a proxy between
the gateway and its workers."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from shared.masters.run_directory import prepare_run_directory
from shared.plan import Plan, plan_inputs, read_plan, write_plan
from shared.settings import Settings
from tests.chaos.http_client import Endpoint
from tests.chaos.proxy import ChaosProxy, Schedule
from tests.e2e.harness import Tercet, until
from tests.tls import Certificate


def make_tercet(base: Path, certificate: Certificate | None = None, **settings: str) -> Tercet:
    """An instance that is not started; with a certificate it serves HTTPS, and its client trusts it."""
    base.mkdir(parents=True, exist_ok=True)
    return Tercet(base, certificate, **settings)


def endpoint_of(tercet: Tercet, certificate: Certificate | None = None) -> Endpoint:
    return Endpoint(tercet.port, certificate.client() if certificate else None)


def start(tercet: Tercet, *, max_descriptors: int | None = None) -> None:
    """Start `tercet serve` and wait until it is warm.

    Args:
        max_descriptors: the soft limit of open files (`ulimit -Sn`) and, so that it cannot be raised, the hard limit.
    """
    tercet.start()
    if max_descriptors is not None:
        # Before the pools are started: they inherit it.
        resource.prlimit(tercet.process.pid, resource.RLIMIT_NOFILE, (max_descriptors, max_descriptors))
    tercet.wait_until_warm()
    until(lambda: "Every slot is warm" in tercet.log(), 10, "the supervisor's announcement")


@contextmanager
def serving(
    base: Path, certificate: Certificate | None = None, /, *, max_descriptors: int | None = None, **settings: str
) -> Iterator[Tercet]:
    """A warm instance, stopped at the end. Whether it stops well is a row's subject, not asserted here."""
    tercet = make_tercet(base, certificate, **settings)
    try:
        start(tercet, max_descriptors=max_descriptors)
        yield tercet
    finally:
        end(tercet)


def end(tercet: Tercet) -> None:
    """Stop an instance, with force if it does not stop."""
    try:
        tercet.stop()
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            tercet.process.kill()
        tercet.process.wait()


@contextmanager
def serving_through_proxies(
    base: Path, schedule: Schedule, **settings: str
) -> Iterator[tuple[Tercet, list[ChaosProxy]]]:
    """Two plain gunicorns: a worker pool, and a gateway whose plan names a proxy's socket for each slot.

    Yields:
        The gateway, and the proxies in slot order.
    """
    pool = make_tercet(base / "pool", None, **settings)
    gateway = make_tercet(base / "gateway", None, **settings)
    gunicorn = (sys.executable, "-m", "gunicorn")
    proxies: list[ChaosProxy] = []
    started: list[Tercet] = []
    try:
        pool.environ["TERCET_ROLE"] = "workers"
        pool.start(*gunicorn)
        started.append(pool)
        plan = until(lambda: _plan_of_running_pool(pool), 60, f"the pool's sockets; {pool.log()[-2000:]}")
        for slot in plan.slots:
            listen = base / f"proxy-{slot.index}.sock"
            proxies.append(ChaosProxy(Endpoint(path=Path(slot.socket)), listen, schedule))
            proxies[-1].start()
        loaded = Settings.load(gateway.environ)
        slots = [
            msgspec.structs.replace(slot, socket=str(proxy.path))
            for slot, proxy in zip(plan.slots, proxies, strict=True)
        ]
        inputs = plan_inputs(loaded, gateway.environ)
        write_plan(Plan(inputs=inputs, models=plan.models, slots=slots), prepare_run_directory(loaded))
        gateway.environ["TERCET_ROLE"] = "gateway"
        gateway.start(*gunicorn)
        started.append(gateway)
        gateway.wait_until_warm()
        yield gateway, proxies
    finally:
        for tercet in reversed(started):
            tercet.process.terminate()
        for tercet in started:
            end(tercet)
        for proxy in proxies:
            proxy.stop()
        pool.client.close()


def _plan_of_running_pool(pool: Tercet) -> Plan | None:
    if pool.process.poll() is not None:
        raise AssertionError(f"the worker pool exited: {pool.log()}")
    if not (pool.run_dir / "slot-0.sock").exists():
        return None
    return read_plan(pool.run_dir)
