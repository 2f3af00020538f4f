"""Models that only other machines hold: what a request for them waits for."""

from __future__ import annotations

import threading

import pytest

import gateway.pool.models
from gateway.pool.models import ServedModels
from shared.plan import REMOTE, Model, Plan
from shared.protocol import State

PLAN = Plan({}, [Model("small", "", REMOTE, 0, 0)], [])
WARM = State(state="warm", model="small", n_ctx=64, vocab_size=500)


def test_a_request_waits_for_the_first_state_after_the_start() -> None:
    """A gateway that takes the place of a killed one has clients before it has states."""
    models = ServedModels(PLAN)
    assert models.get("small").n_ctx == 0
    reports = threading.Timer(0.05, models.learn, ("small", WARM))
    reports.start()
    assert models.wait_for("small").n_ctx == 64
    reports.join()


def test_later_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.pool.models, "FIRST_STATE_S", 0.0)
    assert ServedModels(PLAN).wait_for("small").n_ctx == 0
