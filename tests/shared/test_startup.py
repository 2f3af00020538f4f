"""Before a pool starts: the address is free and the slot plan is current."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import StartError
from shared.plan import Plan, make_slots, plan_inputs, write_plan
from shared.run_directory import prepare_run_directory
from shared.settings import Address, ModelSpec, Settings
from shared.startup import check_address_free, read_or_make_plan


def test_an_address_in_use_is_refused() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = Address("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(StartError, match="set TERCET_BIND to another host:port"):
            check_address_free(address)
    check_address_free(address)


def test_a_current_plan_is_read_and_a_stale_one_refused_where_no_other_can_be_made(tmp_path: Path) -> None:
    """Making a plan needs the model; one that does not exist shows that no plan was made."""
    settings = Settings(run_dir=tmp_path / "r", devices=("cpu",), models=(ModelSpec("mine", "/nonexistent"),))
    run_path = prepare_run_directory(settings)
    plan = Plan(plan_inputs(settings, {}), [], make_slots(["cpu"], [("mine", 2)], run_path, settings.max_batch))
    write_plan(plan, run_path)
    assert read_or_make_plan(settings, {}) == plan
    with pytest.raises(StartError, match="plan could not be made"):
        read_or_make_plan(
            replace(settings, max_batch=3), {"TERCET_MODELS": "mine=/nonexistent", "TERCET_DEVICES": "cpu"}
        )
