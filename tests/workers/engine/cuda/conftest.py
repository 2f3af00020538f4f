"""What the tests of the CUDA path share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.workers.engine.cuda.fake_cuda import FakeCuda, fake_cuda


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors are computed fastest by one thread; with more, the threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda() as fake:
        yield fake
