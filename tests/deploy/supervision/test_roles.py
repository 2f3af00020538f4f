"""`tercet serve`: what it refuses before it starts, which settings each role needs, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.supervision.announcements import print_ready
from deploy.supervision.supervisor import ROLES, Supervisor
from deploy.terminal import make_console
from shared.errors import StartError
from shared.plan import Plan, make_slots
from shared.setting_values import Address, ModelSpec, PoolUrl
from shared.settings import Settings
from tests.e2e.harness import ROOT
from tests.settings import make_settings

POOL = (PoolUrl("small", "https", "gpu-a.example", 8100, 8100),)
BIND = Address("127.0.0.1", 8100)


@pytest.mark.parametrize(
    ("role", "settings", "refusal"),
    [
        ("workers", Settings(), "set TERCET_POOL_BIND"),
        ("workers", make_settings(pool_bind=BIND, pool=POOL), "TERCET_POOL is a setting of gateways"),
        ("workers", make_settings(pool_bind=BIND, idle_stop_s=60.0), "TERCET_IDLE_STOP_S needs the gateway"),
        ("gateway", Settings(), "needs TERCET_POOL"),
        ("gateway", make_settings(pool=POOL, models=(ModelSpec("small"),)), "TERCET_MODELS names models"),
    ],
)
def test_a_role_without_a_way_to_the_other_is_refused(role: str, settings: Settings, refusal: str) -> None:
    with pytest.raises(StartError, match=refusal):
        Supervisor(settings, {}, Console(), (role,)).run()


@pytest.mark.parametrize("role", ROLES)
def test_the_drop_in_of_a_role_starts_it_and_a_server_of_one_role_never_stops_when_idle(role: str) -> None:
    text = (ROOT / f"deploy/supervision/systemd/tercet.service.d/{role}.conf").read_text()
    assert f"/tercet serve --role {role}\n" in text
    assert "UnsetEnvironment=TERCET_IDLE_STOP_S" in text


def test_a_run_directory_that_cannot_be_looked_into_is_refused(tmp_path: Path) -> None:
    """Looking for the files of an earlier instance fails there, as in a directory of another user."""
    with pytest.raises(StartError, match="set TERCET_RUN_DIR"):
        Supervisor(make_settings(run_dir=tmp_path / ("x" * 300)), {}, Console()).run()


def printed(settings: Settings, plan: Plan, roles: tuple[str, ...], failed_slots: dict[int, str]) -> str:
    console = make_console()
    with console.capture() as capture:
        print_ready(console, settings, plan, roles, failed_slots)
    return capture.get()


def test_workers_print_the_setting_of_gateways(tmp_path: Path) -> None:
    plan = Plan({}, [], make_slots(["cuda:0", "cuda:1"], [("small", 2), ("medium", 1)], tmp_path, 48))
    settings = make_settings(pool_bind=Address("10.0.0.1", 8100), pool_tls_cert=tmp_path / "tls.crt")
    text = printed(settings, plan, ("workers",), {})
    pool = (
        "small=https://10.0.0.1:8100-8101,medium=https://10.0.0.1:8102,"
        "small=https://10.0.0.1:8103-8104,medium=https://10.0.0.1:8105"
    )
    assert f"TERCET_POOL={pool}\n" in text
    assert len(Settings.load({"TERCET_POOL": pool}).remote.pool) == 4
    assert "Every slot is warm (small × 4, medium × 2)" in text
    assert "1 of 6 slots failed" in printed(settings, plan, ("workers",), {3: "out of memory"})


def test_a_gateway_without_workers_says_where_it_serves() -> None:
    text = printed(make_settings(pool=POOL), Plan({}, [], []), ("gateway",), {})
    assert text.startswith("Serving at http://127.0.0.1:8000 with the workers of TERCET_POOL")
    assert "Every slot" not in text
    plan = Plan({}, [], make_slots(["cpu"], [("embedded", 1)], Path("/run"), 48))
    assert printed(Settings(), plan, ROLES, {}).startswith("Every slot is warm (embedded × 1). Serving at http://127")
    settings = make_settings(tls_cert=Path("/[red]/cert"), tls_key=Path("/key"))
    text = printed(settings, plan, ROLES, {0: "The checkpoint in /models/[/x] is damaged."})
    assert "--cacert '/[red]/cert'" in text
    assert "https://127.0.0.1:8000/autocomplete" in text
    settings = make_settings(tls_cert=Path("/cert"), tls_key=Path("/key"), hosts=("*.example", "tercet.lan"))
    assert "https://tercet.lan:8000/autocomplete" in printed(settings, plan, ROLES, {})
    assert "(embedded on cpu) is not warm and tries again: The checkpoint in /models/[/x] is damaged.\n" in text


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({}, ""),
        ({"insecure": True, "bind": Address("0.0.0.0", 8000)}, "no API keys, and texts cross the network unencrypted"),
        ({"keys": Path("/keys"), "bind": Address("0.0.0.0", 8000)}, "API keys and texts cross the network"),
        ({"keys": Path("/keys"), "bind": Address("0.0.0.0", 8000), "tls_cert": Path("/c"), "tls_key": Path("/k")}, ""),
        ({"sagemaker": True, "bind": Address("0.0.0.0", 8080)}, ""),
    ],
)
def test_a_gateway_says_what_other_machines_can_do_or_read(settings: dict[str, Any], note: str) -> None:
    text = printed(make_settings(**settings), Plan({}, [], []), ("gateway",), {})
    assert ("Note:" in text) == bool(note)
    assert note in text
