"""Fixtures of the gateway's tests: the app in this process over real collaborators, without workers or with stubs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from falcon import testing

from gateway.app import GatewayApp, create_app
from gateway.generation.fanout import Fanout
from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from gateway.pool.retries import RetryBudget
from shared.cancellation import HangupWatcher
from shared.plan import Model, Plan, make_slots
from shared.protocol import State
from shared.settings import Settings
from tests.gateway.generation.stubs import MakePool, Respond, StubPool


@dataclass(frozen=True)
class Gateway:
    """An app and what its tests act upon. Two slots of `small`, one of `medium`; no client calls them."""

    app: GatewayApp
    client: testing.TestClient
    admission: Admission
    metrics: Metrics


MakeGateway = Callable[..., Gateway]
WARM = State(
    state="warm",
    ms_per_token=1.23456,
    progress=1.0,
    dtype="int8",
    kernels="triton; graphs: on",
    revision="abc",
    max_batch=3,
    in_flight=2,
    memory_bytes=5 << 20,
    pid=7,
    age=4,
    counters={"prompt_tokens": 5},
)


@pytest.fixture(scope="session")
def hangups() -> HangupWatcher:
    """One for all tests: its thread runs until the process ends."""
    return HangupWatcher()


@pytest.fixture
def make_gateway(tmp_path: Path, hangups: HangupWatcher) -> MakeGateway:
    """Makes a gateway from settings, given as their environment variables without the prefix."""

    def make(**settings: str) -> Gateway:
        plan = Plan(
            {},
            [
                Model("small", "/models/small", "hub:small", n_ctx=1024, vocab_size=50257),
                Model("medium", "/models/medium", "hub:medium", n_ctx=1024, vocab_size=50257, warning="not checked"),
            ],
            make_slots(["cpu"], [("small", 2), ("medium", 1)], tmp_path, 3),
        )
        loaded = Settings.load({f"TERCET_{name.upper()}": value for name, value in settings.items()})
        admission = Admission(plan, loaded.pool.placement, loaded.limits.queue)
        metrics = Metrics(admission.states, lambda: admission.num_waiting)
        app = create_app(
            settings=loaded,
            admission=admission,
            fanout=Fanout([], admission, metrics, num_threads=1, retry_budget=RetryBudget(3)),
            metrics=metrics,
            hangups=hangups,
        )
        client = testing.TestClient(app, headers={"Host": "localhost:8000"})
        return Gateway(app, client, admission, metrics)

    return make


@pytest.fixture
def gateway(make_gateway: MakeGateway) -> Gateway:
    """A gateway with default settings."""
    return make_gateway()


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose path leaves room for a socket's name."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def make_pool(short_path: Path) -> Iterator[MakePool]:
    """Makes a pool, with a stub worker for each responder, that the test's end closes."""
    with ExitStack() as stack:

        def make(*responders: Respond, **options: Any) -> StubPool:
            pool = StubPool(short_path, *responders, **options)
            stack.callback(pool.close)
            return pool

        yield make
