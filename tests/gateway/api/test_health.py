"""Health, readiness and metrics, in process."""

from __future__ import annotations

import pytest

from gateway.routes import READY_PATHS
from shared.protocol import State
from tests.gateway.conftest import WARM, Gateway


@pytest.mark.parametrize("path", READY_PATHS)
def test_ready_when_every_model_has_a_warm_slot(gateway: Gateway, path: str) -> None:
    """Two slots have the first model, the third the second."""
    for slots, status in (((), 503), ((0, 1), 503), ((2,), 200)):
        for slot in slots:
            gateway.admission.update(slot, WARM)
        response = gateway.client.simulate_get(path)
        assert (response.status_code, response.json["status"]) == (status, "ready" if status == 200 else "starting")
        assert status == 200 or 1 <= int(response.headers["Retry-After"]) <= 3
    assert "Retry-After" not in response.headers


def test_draining_whatever_the_slots_do(gateway: Gateway) -> None:
    for slot in range(3):
        gateway.admission.update(slot, WARM)
    gateway.app.begin_stop(is_replaced=True)  # a probe on an open connection after a reload
    assert gateway.client.simulate_get("/health/ready").status_code == 200
    gateway.app.begin_stop(is_replaced=False)
    response = gateway.client.simulate_get("/health/ready")
    assert (response.status_code, response.json["status"]) == (503, "draining")
    assert 1 <= int(response.headers["Retry-After"]) <= 3
    live = gateway.client.simulate_get("/health/live")
    assert (live.status_code, live.json) == (200, {"status": "live"})


def test_the_body_has_a_row_per_slot_and_per_model(gateway: Gateway) -> None:
    gateway.admission.update(0, WARM)
    gateway.admission.update(2, State(state="failed", reason="no such file"))
    body = gateway.client.simulate_get("/health/ready").json
    assert body["models"] == [
        {"model": "small", "source": "hub:small", "warning": None, "bytes": 1 << 30},
        {"model": "medium", "source": "hub:medium", "warning": "not checked", "bytes": 1 << 30},
    ]
    assert body["slots"][0] == {
        "slot": 0,
        "model": "small",
        "device": "cpu",
        "state": "warm",
        "reason": None,
        "progress": 1.0,
        "dtype": "int8",
        "kernels": "triton; graphs: on",
        "ms_per_token": 1.235,
    }
    assert [(slot["model"], slot["state"]) for slot in body["slots"]] == [
        ("small", "warm"),
        ("small", "down"),
        ("medium", "failed"),
    ]
    assert body["slots"][2]["reason"] == "no such file"
