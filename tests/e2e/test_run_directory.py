"""A run directory whose files are removed while the instance runs: it serves on, and makes again what it made."""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from shared.masters.run_directory import MARKER_FILE
from shared.plan import PLAN_FILE
from tests.chaos.rows.files import accepts_connections
from tests.e2e.harness import Gunicorn, Tercet, running, serving, until


@pytest.fixture(scope="module")
def tercet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    with running(tmp_path_factory.mktemp("t"), models="embedded*2") as instance:
        yield instance


def sockets(tercet: Tercet) -> list[Path]:
    return [tercet.run_dir / f"slot-{index}.sock" for index in range(2)]


def remove_sockets(tercet: Tercet) -> None:
    for path in sockets(tercet):
        path.unlink()


def remove_old_files(tercet: Tercet) -> None:
    """What programs that clean /tmp remove: regular files, not sockets."""
    for path in tercet.run_dir.iterdir():
        if stat.S_ISREG(path.lstat().st_mode):
            path.unlink()


def remove_all(tercet: Tercet) -> None:
    shutil.rmtree(tercet.run_dir)


REMOVALS = (remove_old_files, remove_sockets, remove_all)


def wait_until_whole(tercet: Tercet) -> None:
    names = (MARKER_FILE, PLAN_FILE, "serve.lock")
    until(lambda: all((tercet.run_dir / name).is_file() for name in names), 20, "the files are there again")
    until(lambda: all(map(accepts_connections, sockets(tercet))), 20, "each worker accepts at its socket")
    assert tercet.run_dir.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in sockets(tercet))
    refused = tercet.run("serve")
    assert refused.returncode == 1
    assert "is in use by process" in refused.stderr


@contextmanager
def replacing(tercet: Tercet, *pids: int) -> Iterator[None]:
    yield
    until(lambda: not any(map(psutil.pid_exists, pids)), 60, "the processes are replaced")
    assert {slot["slot"] for slot in tercet.wait_until_warm()} == {0, 1}


def kill_gateway(tercet: Tercet) -> None:
    worker = tercet.processes()["gateway"][1].pid
    with replacing(tercet, worker):
        os.kill(worker, signal.SIGKILL)


def kill_worker(tercet: Tercet) -> None:
    worker = tercet.wait_until_warm()[0]["pid"]
    with replacing(tercet, worker):
        os.kill(worker, signal.SIGKILL)


def kill_masters(tercet: Tercet) -> None:
    for role in ("workers", "gateway"):
        pids = [process.pid for process in tercet.processes()[role]]
        with replacing(tercet, *pids):
            os.kill(pids[0], signal.SIGKILL)


def reload(tercet: Tercet) -> None:
    pids = [slot["pid"] for slot in tercet.wait_until_warm()]
    with replacing(tercet, *pids):
        tercet.process.send_signal(signal.SIGHUP)


@pytest.mark.parametrize(
    ("remove", "event"),
    [
        (remove_old_files, kill_gateway),
        (remove_sockets, kill_worker),
        (remove_sockets, reload),
        (remove_all, kill_masters),
    ],
)
def test_an_instance_serves_on_and_heals(
    tercet: Tercet, remove: Callable[[Tercet], None], event: Callable[[Tercet], None]
) -> None:
    remove(tercet)
    tercet.ask()
    event(tercet)
    for number in range(4):
        tercet.ask(f"Request {number} after that.")
    wait_until_whole(tercet)


@pytest.mark.parametrize("remove", REMOVALS)
def test_an_instance_heals_by_itself(tercet: Tercet, remove: Callable[[Tercet], None]) -> None:
    """No process ends: a second gateway, or one that needs another connection, reaches the workers again."""
    pids = [slot["pid"] for slot in tercet.wait_until_warm()]
    remove(tercet)
    wait_until_whole(tercet)
    assert [slot["pid"] for slot in tercet.wait_until_warm()] == pids


def test_a_pool_without_supervisor_heals(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("g")
    with serving(Gunicorn(base, "workers")) as pool:
        shutil.rmtree(pool.run_dir)
        path = pool.run_dir / "slot-0.sock"
        until(lambda: accepts_connections(path), 20, "the worker accepts again")
        [worker] = psutil.Process(pool.process.pid).children()
        worker.kill()
        until(lambda: not worker.is_running() and accepts_connections(path), 60, "its successor accepts")
        assert (pool.run_dir / PLAN_FILE).is_file()
        assert (pool.run_dir / "workers.lock").is_file()
