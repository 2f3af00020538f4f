"""A run directory whose files are removed while the instance runs: it serves on, and makes again what it made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import psutil
import pytest

from shared.plan import PLAN_FILE
from tests.chaos.rows.files import accepts_connections, is_whole
from tests.e2e.harness import Gunicorn, Tercet, running, serving, until


@pytest.fixture(scope="module")
def tercet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    with running(tmp_path_factory.mktemp("t"), models="embedded*2") as instance:
        yield instance


def wait_until_whole(tercet: Tercet) -> None:
    until(lambda: is_whole(tercet.run_dir), 60, "the files are there again, and each worker accepts at its socket")
    assert tercet.run_dir.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tercet.run_dir.glob("slot-*.sock"))


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
