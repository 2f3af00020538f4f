"""`tercet serve --sagemaker` as SageMaker's container runs it, with the embedded checkpoint."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import httpx

from tests.e2e.harness import START_S, TERCET, Tercet, serving, until
from workers.checkpoints.resolve import EMBEDDED


class Container(Tercet):
    """`tercet serve --sagemaker`, on a free port. It has a key file, which this mode ignores."""

    command: tuple[str, ...] = (*TERCET, "serve", "--sagemaker", str(EMBEDDED))

    def __init__(self, base: Path) -> None:
        super().__init__(base, keys="/nowhere/keys", grace_s="20")

    def wait_until_announced(self) -> None:
        until(self.is_warm, START_S, "a warm model")

    def is_warm(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            return self.client.get("/ping", timeout=2).status_code == 200
        except httpx.TransportError:
            return False


def running_container(base: Path) -> AbstractContextManager[Container]:
    """A warm container, stopped at the end."""
    return serving(Container(base))
