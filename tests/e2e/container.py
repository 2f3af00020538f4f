"""`tercet serve --sagemaker` as SageMaker's container runs it, with the embedded checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.e2e.harness import START_S, Tercet, until
from workers.checkpoints.resolve import EMBEDDED


class Container(Tercet):
    """`tercet serve --sagemaker`, on a free port. It has a key file, which this mode ignores."""

    def __init__(self, base: Path) -> None:
        super().__init__(base, keys="/nowhere/keys", grace_s="20")
        self.ping_statuses: list[int] = []

    def is_warm(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            self.ping_statuses.append(self.client.get("/ping", timeout=2).status_code)
        except httpx.TransportError:
            return False
        return self.ping_statuses[-1] == 200


@contextmanager
def running_container(base: Path) -> Iterator[Container]:
    """A warm container, stopped at the end."""
    instance = Container(base)
    instance.start(sys.executable, "-m", "deploy", "serve", "--sagemaker", str(EMBEDDED))
    try:
        until(instance.is_warm, START_S, "a warm model")
        yield instance
    finally:
        instance.stop()
