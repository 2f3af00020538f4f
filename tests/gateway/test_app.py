"""The app as a whole: its routes, `create_app` without side effects, and `build` from an environment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import falcon.inspect
import msgspec
import pytest

from gateway.api.schema import parse_autocomplete_request
from gateway.app import has_room_for_job
from gateway.generation.fanout import MAX_BRANCHES_AT_ONCE
from shared.errors import InvalidRequest
from shared.plan import Model, Plan, make_slots, write_plan
from tests.gateway.conftest import Gateway, MakeGateway
from tests.gateway.pool.reservations import make

ROOT = Path(__file__).parents[2]


def test_every_route_that_takes_get_takes_head(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(timeout_s="0.3")  # what asks a worker waits for one
    paths = [
        route.path
        for route in falcon.inspect.inspect_routes(gateway.app)
        if any(method.method == "GET" and not method.internal for method in route.methods)
    ]
    assert {"/", "/health/live", "/health/ready", "/metrics", "/slots", "/static/{name}"} <= set(paths)
    for path in paths:
        url = path.replace("{name}", "tercet.js")
        get, head = gateway.client.simulate_get(url), gateway.client.simulate_head(url)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers["content-type"] == get.headers["content-type"]
        if path != "/metrics":  # it has counted the first request
            assert head.headers["content-length"] == get.headers["content-length"]


def test_create_app_reads_no_environment_and_starts_no_thread(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERCET_MAX_BODY_BYTES", "not a number")
    before = set(threading.enumerate())
    gateway = make_gateway()
    assert set(threading.enumerate()) <= before
    assert gateway.client.simulate_get("/health/live").status_code == 200


def test_a_thread_is_planned_for_each_branch_that_a_request_may_have() -> None:
    body = b'{"context": "a", "n_samples": %d}'
    assert parse_autocomplete_request(body % MAX_BRANCHES_AT_ONCE).n_samples == MAX_BRANCHES_AT_ONCE
    with pytest.raises(InvalidRequest):
        parse_autocomplete_request(body % (MAX_BRANCHES_AT_ONCE + 1))


def test_metric_names_do_not_change(gateway: Gateway) -> None:
    types = [line.split()[2] for line in gateway.metrics.exposition().decode().splitlines() if line[:6] == "# TYPE"]
    assert sorted(types) == [
        "tercet_branch_retries_refused_total",
        "tercet_branch_retries_total",
        "tercet_branches_total",
        "tercet_build_info",
        "tercet_jobs_total",
        "tercet_kept_characters_total",
        "tercet_log_records_dropped_total",
        "tercet_prediction_kept_characters_total",
        "tercet_prediction_saved_characters_total",
        "tercet_predictions_total",
        "tercet_refused_requests_total",
        "tercet_request_seconds",
        "tercet_requests_total",
        "tercet_saved_characters_total",
        "tercet_slot_cached_tokens_total",
        "tercet_slot_certificate_expiry_seconds",
        "tercet_slot_failures_total",
        "tercet_slot_generated_tokens_total",
        "tercet_slot_generation",
        "tercet_slot_in_flight_branches",
        "tercet_slot_load_progress_ratio",
        "tercet_slot_log_records_dropped_total",
        "tercet_slot_max_batch_branches",
        "tercet_slot_memory_bytes",
        "tercet_slot_prompt_tokens_total",
        "tercet_slot_reloads_total",
        "tercet_slot_restarts_total",
        "tercet_slot_sequences_total",
        "tercet_slot_state",
        "tercet_slot_token_seconds",
        "tercet_suggestions_total",
        "tercet_waiting_branches",
    ]


def run_build(run_path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """`build()` in a process of its own, whose logging and environment it may change."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
    environ |= {"TERCET_RUN_DIR": str(run_path), "PYTHONPATH": str(ROOT), **settings}
    command = [sys.executable, "-c", "from gateway.app import build; build()"]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("settings", [{}, {"TERCET_NO_SUCH": "1"}, {"TERCET_QUEUE": "many"}])
def test_build_without_a_plan_or_with_a_wrong_setting_fails(short_path: Path, settings: dict[str, str]) -> None:
    result = run_build(short_path, **settings)
    assert result.returncode != 0
    assert "StartError" in result.stderr


@pytest.mark.parametrize(
    ("settings", "exposure"),
    [
        ({"TERCET_BIND": "0.0.0.0:8000", "TERCET_INSECURE": "1"}, {"keys": False, "tls": False}),
        ({"TERCET_BIND": "0.0.0.0:8000", "TERCET_KEYS": "/nonexistent"}, {"keys": True, "tls": False}),
        ({"TERCET_BIND": "0.0.0.0:8000", "TERCET_KEYS": "/nonexistent", "TERCET_TLS_CERT": "c"}, None),
        ({"TERCET_BIND": "127.0.0.1:8000"}, None),
    ],
)
def test_an_exposed_address_is_logged(
    short_path: Path, settings: dict[str, str], exposure: dict[str, bool] | None
) -> None:
    models = [Model("small", "/models/small", "hub:small", n_ctx=1024, vocab_size=50257)]
    write_plan(Plan({}, models, make_slots(["cpu"], [("small", 1)], short_path, 3)), short_path)
    result = run_build(short_path, **settings)
    assert result.returncode == 0, result.stderr
    events = [msgspec.json.decode(line) for line in result.stderr.splitlines()]
    found = [event for event in events if event["event"] == "address_exposed"]
    assert len(found) == (exposure is not None)
    if exposure is not None:
        assert found[0] | exposure | {"address": "0.0.0.0:8000", "level": "warning"} == found[0]


@pytest.mark.parametrize(
    ("device", "num_awaited", "most"), [("cpu", 0, 4), ("cpu", 1, 1), ("cpu", 7, 2), ("cpu", 40, 4), ("cuda:0", 1, 4)]
)
def test_jobs_keep_to_their_share(device: str, num_awaited: int, most: int) -> None:
    admission = make([("small", 1)], device=device, max_batch=48)
    assert has_room_for_job(admission, num_awaited, most - 1)
    assert not has_room_for_job(admission, num_awaited, most)
    assert not has_room_for_job(make([("small", 1)], device=device, warm=False), num_awaited, 0)
