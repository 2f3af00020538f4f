"""Several gateways over one pool of workers, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.e2e.harness import START_S, Tercet, until
from tests.e2e.remote_pool import Gateway, Workers, running_workers


@contextmanager
def running_gateways(
    base: Path, settings: Mapping[str, Mapping[str, str]], *, step_delay_ms: int, max_batch: int
) -> Iterator[tuple[Workers, dict[str, Gateway]]]:
    """Warm gateways over one pool of two workers, stopped at the end.

    Args:
        settings: settings of each gateway, by a name.
        step_delay_ms: added to each step of the workers, so that a request lasts long enough to act meanwhile.
        max_batch: batch of each worker; the gateways share it.

    Yields:
        The pool, and the gateways by name.
    """
    delays = ",".join(f"{slot}={step_delay_ms}" for slot in range(2))
    workers_base = base / "w"
    with (
        running_workers(workers_base, 2, test_step_delay_ms=delays, max_batch=str(max_batch)) as workers,
        ExitStack() as stack,
    ):
        gateways = {name: Gateway(base / name, **workers.gateway_settings, **own) for name, own in settings.items()}
        for gateway in gateways.values():
            gateway.start()
            stack.callback(_end, gateway)
        for gateway in gateways.values():
            wait_until_ready(gateway)
        yield workers, gateways


def wait_until_ready(gateway: Tercet) -> None:
    def is_ready() -> bool:
        page = gateway.ready()
        return page is not None and page["status"] == "ready"

    until(is_ready, START_S, f"ready; {gateway.log()[-3000:]}")


def _end(gateway: Gateway) -> None:
    gateway.client.close()
    gateway.process.terminate()
    gateway.process.wait(timeout=40)
