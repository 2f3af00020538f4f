"""Reloads, another checkpoint, kills and stops under load, each once. The instances are shared by several tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import lifecycle
from tests.e2e.harness import Tercet, running, until


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints that answer differently, and a link to the first: `a`, `b`, `mine`."""
    path = tmp_path_factory.mktemp("t")
    lifecycle.make_checkpoint(path / "a")
    lifecycle.make_checkpoint(path / "b", scale=1.5)
    (path / "mine").symlink_to(path / "a")
    return path


@pytest.fixture(scope="module")
def tercet(directory: Path) -> Iterator[Tercet]:
    """Two slots of a checkpoint behind a link. A branch of each request goes to each slot."""
    with running(directory, models=f"mine={directory / 'mine'}*2", placement="spread") as instance:
        yield instance


def test_reloading_either_pool_fails_no_request(tercet: Tercet) -> None:
    lifecycle.reload_pools(tercet, 1)


def test_a_failed_reload_changes_nothing_and_the_next_works(tercet: Tercet, directory: Path) -> None:
    lifecycle.fail_reloads(tercet, directory / "a" / "model.safetensors", 1)


def test_a_rolling_change_of_model_fails_no_request_and_mixes_no_answer(tercet: Tercet, directory: Path) -> None:
    lifecycle.change_model(tercet, directory / "mine", (directory / "a", directory / "b"), 1)


def test_a_rolling_change_to_a_broken_model_stops_at_the_first_slot(tercet: Tercet, directory: Path) -> None:
    broken = lifecycle.make_checkpoint(directory / "broken", scale=float("nan"))
    lifecycle.refuse_a_broken_model(tercet, directory / "mine", broken)


def test_tercet_reload_refuses_what_it_cannot_change(tercet: Tercet) -> None:
    done = lifecycle.tercet_reload(tercet, "--model", "other")
    assert (done.returncode, "served are mine" in done.stderr) == (1, True), done.stderr


def test_dead_masters_are_replaced_and_no_request_fails(tercet: Tercet) -> None:
    lifecycle.kill_masters(tercet, 1)


def test_a_killed_supervisor_is_followed_by_a_new_one_at_once(tercet: Tercet) -> None:
    lifecycle.kill_the_supervisor(tercet, 1)


def test_a_stop_and_a_start_behind_a_kept_socket_lose_nothing_and_a_stop_keeps_its_grace(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    grace_s = 3.0
    instance = Tercet(
        tmp_path_factory.mktemp("t"), models="embedded*2", grace_s=str(grace_s), drain_s="0.5",
        test_step_delay_ms="0=20,1=20",
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", instance.port), backlog=128) as listener:
        lifecycle.start_behind(instance, listener)
        instance.wait_until_warm()
        until(lambda: instance.num_starts, 10, "announced")
        lifecycle.restart_behind_a_kept_socket(instance, listener, 1)
        lifecycle.stop_under_load(instance, grace_s=grace_s)
        instance.client.close()
    assert not instance.run_dir.exists()
