"""Several gateways over one pool of workers, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.e2e.harness import START_S, Tercet, until
from tests.e2e.remote_pool import Gateway, Workers, running_workers

# Milliseconds of each step of the workers, so that a request lasts long enough to act meanwhile.
STEP_DELAY_MS = 10


@contextmanager
def running_gateways(
    base: Path, settings: Mapping[str, Mapping[str, str]], **of_workers: str
) -> Iterator[tuple[Workers, dict[str, Gateway]]]:
    """Warm gateways over one pool, stopped at the end, with force if need be.

    Args:
        settings: of each gateway, by a name.
        of_workers: settings of the pool.

    Yields:
        The pool, and the gateways by name.
    """
    (base / "w").mkdir()
    with (
        running_workers(base / "w", test_step_delay_ms=str(STEP_DELAY_MS), **of_workers) as workers,
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
