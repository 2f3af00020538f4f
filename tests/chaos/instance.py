"""An instance of Tercet with a proxy between the gateway and each of its workers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shared.masters.run_directory import prepare_run_directory
from shared.plan import Plan, plan_inputs, read_plan, write_plan
from shared.settings import Settings
from tests.chaos.proxy import ChaosProxy, Schedule
from tests.e2e.harness import GUNICORN, Tercet, until


@contextmanager
def serving_through_proxies(
    base: Path, schedule: Schedule, **settings: str
) -> Iterator[tuple[Tercet, list[ChaosProxy]]]:
    """Two plain gunicorns: a worker pool, and a gateway whose plan names a proxy's socket for each slot.

    Yields:
        The gateway, and the proxies in slot order.
    """
    pool, gateway = Tercet(base / "pool", **settings), Tercet(base / "gateway", **settings)
    proxies: list[ChaosProxy] = []
    started: list[Tercet] = []
    try:
        pool.environ["TERCET_ROLE"] = "workers"
        pool.start(*GUNICORN)
        started.append(pool)
        plan = until(lambda: _plan_of_running_pool(pool), 60, f"the pool's sockets; {pool.log()[-2000:]}")
        for slot in plan.slots:
            proxies.append(ChaosProxy(Path(slot.socket), base / f"proxy-{slot.index}.sock", schedule))
            proxies[-1].start()
        loaded = Settings.load(gateway.environ)
        slots = [
            msgspec.structs.replace(slot, socket=str(proxy.path))
            for slot, proxy in zip(plan.slots, proxies, strict=True)
        ]
        inputs = plan_inputs(loaded, gateway.environ)
        write_plan(Plan(inputs=inputs, models=plan.models, slots=slots), prepare_run_directory(loaded))
        gateway.environ["TERCET_ROLE"] = "gateway"
        gateway.start(*GUNICORN)
        started.append(gateway)
        gateway.wait_until_warm()
        yield gateway, proxies
    finally:
        for tercet in reversed(started):
            tercet.process.terminate()
        for tercet in started:
            try:
                tercet.stop()
            except subprocess.TimeoutExpired:
                tercet.process.kill()
                tercet.process.wait()
        for proxy in proxies:
            proxy.stop()


def _plan_of_running_pool(pool: Tercet) -> Plan | None:
    if pool.process.poll() is not None:
        raise AssertionError(f"the worker pool exited: {pool.log()}")
    if not (pool.run_dir / "slot-0.sock").exists():
        return None
    return read_plan(pool.run_dir)
