"""The plan of a gateway whose workers are on other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.tuning.planning import make_plan
from shared.plan import MAX_REMOTE_BRANCHES, REMOTE, plan_inputs
from shared.settings import Settings
from tests.deploy.command_line.test_cli import run_module

POOL = "small=https://gpu-a.example:8100-8103,medium=https://gpu-b.example:8100"


def test_without_local_models_a_plan_has_the_models_of_the_pool_and_no_slot(tmp_path: Path) -> None:
    environ = {"TERCET_POOL": POOL, "TERCET_RUN_DIR": str(tmp_path / "r"), "CUDA_VISIBLE_DEVICES": "0"}
    settings = Settings.load(environ)
    plan = make_plan(settings, environ)
    assert plan.slots == []
    assert [(model.name, model.source, model.n_ctx) for model in plan.models] == [
        ("small", REMOTE, 0),
        ("medium", REMOTE, 0),
    ]
    assert plan.default_model == "small"
    assert plan.max_running == MAX_REMOTE_BRANCHES
    assert plan.inputs != plan_inputs(Settings.load(environ | {"TERCET_POOL": POOL + "-8101"}), environ)


def test_with_local_models_a_plan_has_both(tmp_path: Path) -> None:
    environ = {
        "TERCET_POOL": POOL,
        "TERCET_RUN_DIR": str(tmp_path / "r"),
        "TERCET_DEVICES": "cpu",
        "TERCET_MODELS": "embedded*2",
    }
    plan = make_plan(Settings.load(environ), environ)
    assert [(slot.index, slot.model) for slot in plan.slots] == [(0, "embedded"), (1, "embedded")]
    assert [model.name for model in plan.models] == ["embedded", "small", "medium"]
    assert plan.model("embedded").n_ctx > 0
    assert plan.max_running == 2 * 48 + MAX_REMOTE_BRANCHES


@pytest.mark.parametrize(
    ("command", "role", "text"),
    [
        (["deploy", "serve"], None, "--role gateway"),
        (["gunicorn", "--check-config"], "workers", "start the gateway only"),
    ],
    ids=["serve", "gunicorn"],
)
def test_workers_without_a_slot_do_not_start(tmp_path: Path, command: list[str], role: str | None, text: str) -> None:
    """Without an address, gunicorn would bind its own default."""
    environ = {"TERCET_POOL": POOL, "TERCET_RUN_DIR": str(tmp_path / "r"), "TERCET_INSECURE": "1"}
    result = run_module(*command, **environ | ({"TERCET_ROLE": role} if role else {}))
    assert result.returncode != 0
    assert text in " ".join((result.stdout + result.stderr).split())
