"""A run directory whose files are removed while the instance runs: it serves on, and makes again what it made."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shared.plan import PLAN_FILE
from tests.chaos.rows.files import accepts_connections, is_whole, remove_regular_files, remove_sockets
from tests.chaos.rows.workers import pids, wait_until_replaced
from tests.e2e.harness import START_S, Gunicorn, Tercet, running, serving, until


@pytest.fixture(scope="module")
def tercet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    with running(tmp_path_factory.mktemp("t"), models="embedded*2") as instance:
        yield instance


def wait_until_whole(tercet: Tercet) -> None:
    until(lambda: is_whole(tercet.run_dir), 60, "the files are there again, and each worker accepts at its socket")
    assert tercet.run_dir.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tercet.run_dir.glob("slot-*.sock"))


def kill(tercet: Tercet, victims: list[int]) -> None:
    """Kill the first of these processes, and wait until the others are replaced as well."""
    os.kill(victims[0], signal.SIGKILL)
    wait_until_replaced(tercet, victims, START_S)


def kill_gateway(tercet: Tercet) -> None:
    kill(tercet, [tercet.processes()["gateway"][1].pid])


def kill_worker(tercet: Tercet) -> None:
    kill(tercet, pids(tercet)[:1])


def kill_masters(tercet: Tercet) -> None:
    for role in ("workers", "gateway"):
        kill(tercet, [process.pid for process in tercet.processes()[role]])


def reload(tercet: Tercet) -> None:
    before = pids(tercet)
    tercet.process.send_signal(signal.SIGHUP)
    wait_until_replaced(tercet, before, START_S)


@pytest.mark.parametrize(
    ("remove", "event"),
    [
        (remove_regular_files, kill_gateway),
        (remove_sockets, kill_worker),
        (remove_sockets, reload),
        (shutil.rmtree, kill_masters),
    ],
)
def test_an_instance_serves_on_and_heals(
    tercet: Tercet, remove: Callable[[Path], None], event: Callable[[Tercet], None]
) -> None:
    """By itself, without a process that ends; and at an event before that."""
    before = pids(tercet)
    remove(tercet.run_dir)
    wait_until_whole(tercet)
    assert pids(tercet) == before
    remove(tercet.run_dir)
    tercet.ask()
    event(tercet)
    for number in range(4):
        tercet.ask(f"Request {number} after that.")
    wait_until_whole(tercet)


def test_after_all_files_were_removed_a_second_serve_is_refused(tercet: Tercet) -> None:
    shutil.rmtree(tercet.run_dir)
    wait_until_whole(tercet)
    refused = tercet.run("serve")
    assert refused.returncode == 1
    assert "is in use by process" in refused.stderr


def test_a_pool_without_supervisor_heals(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("g")
    with serving(Gunicorn(base, "workers")) as pool:
        shutil.rmtree(pool.run_dir)
        path = pool.run_dir / "slot-0.sock"
        until(lambda: accepts_connections(path), 60, "the worker accepts again")
        [worker] = psutil.Process(pool.process.pid).children()
        worker.kill()
        until(lambda: not worker.is_running() and accepts_connections(path), 60, "its successor accepts")
        assert (pool.run_dir / PLAN_FILE).is_file()
        assert (pool.run_dir / "workers.lock").is_file()
