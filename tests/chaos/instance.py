"""An instance of Tercet with a proxy between the gateway and each of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from shared.masters.run_directory import prepare_run_directory
from shared.plan import Plan, plan_inputs, read_plan, write_plan
from shared.settings import Settings
from tests.chaos.proxy import ChaosProxy, Schedule
from tests.e2e.harness import Gunicorn, Tercet, serving


@contextmanager
def serving_through_proxies(
    base: Path, schedule: Schedule, **settings: str
) -> Iterator[tuple[Tercet, list[ChaosProxy]]]:
    """Two plain gunicorns: a worker pool, and a gateway whose plan names a proxy's socket for each slot.

    Yields:
        The gateway, and the proxies in slot order.
    """
    gateway = Gunicorn(base / "gateway", "gateway", **settings)
    with ExitStack() as stack:
        pool = stack.enter_context(serving(Gunicorn(base / "pool", "workers", **settings)))
        plan = read_plan(pool.run_dir)
        proxies = [ChaosProxy(Path(slot.socket), base / f"proxy-{slot.index}.sock", schedule) for slot in plan.slots]
        for proxy in proxies:
            proxy.start()
            stack.callback(proxy.stop)
        loaded = Settings.load(gateway.environ)
        slots = [
            msgspec.structs.replace(slot, socket=str(proxy.path))
            for slot, proxy in zip(plan.slots, proxies, strict=True)
        ]
        inputs = plan_inputs(loaded, gateway.environ)
        write_plan(Plan(inputs=inputs, models=plan.models, slots=slots), prepare_run_directory(loaded))
        stack.enter_context(serving(gateway))
        gateway.wait_until_warm()
        yield gateway, proxies
