"""What the tests of the CUDA path share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.engine.cuda.fake_cuda import FakeCuda, fake_cuda


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda() as fake:
        yield fake
