"""Fixtures of the generation's tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.generation.stubs import Respond, StubPool


@pytest.fixture
def make_pool(short_path: Path) -> Iterator[Callable[..., StubPool]]:
    """Makes a pool, with a stub worker for each responder, that the test's end closes."""
    with ExitStack() as stack:

        def make(*responders: Respond, **options: Any) -> StubPool:
            pool = StubPool(short_path, *responders, **options)
            stack.callback(pool.close)
            return pool

        yield make
