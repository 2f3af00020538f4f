"""Workers whose load ends in a device error: real processes, which their master replaces with growing pauses."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import START_S, Tercet, until
from workers.checkpoints.resolve import EMBEDDED


@pytest.mark.parametrize(("fault", "reason"), [("device", "The device failed while the model"), ("", "mine")])
def test_a_first_load_that_fails_stops_the_start_with_its_reason(short_tmp_path: Path, fault: str, reason: str) -> None:
    """A worker that the failure ends; and one that finds no checkpoint, which was there when the plan was made."""
    mine = short_tmp_path / "mine"
    shutil.copytree(EMBEDDED, mine)
    instance = Tercet(short_tmp_path, models=f"mine={mine}", **({"test_load_faults": f"0={fault}"} if fault else {}))
    instance.start()
    try:
        if not fault:
            until((instance.run_dir / "plan.json").exists, 60, "the plan")
            shutil.rmtree(mine)  # before a worker has imported torch
        assert instance.process.wait(timeout=START_S) == 1
    finally:
        instance.process.kill()
    log = " ".join(instance.log().split())
    assert "mine could not be loaded on cpu" in log
    assert reason in log
    assert not instance.run_dir.exists()


def test_a_start_whose_workers_are_all_killed_ends_with_a_sentence(short_tmp_path: Path) -> None:
    """As the kernel does where the memory does not suffice: it went on for ever, and said nothing."""
    instance = Tercet(short_tmp_path, models="embedded*2")
    instance.start()
    killed: set[int] = set()
    try:
        while instance.process.poll() is None and len(killed) < 20:
            with suppress(psutil.NoSuchProcess):
                for worker in instance.processes().get("workers", [])[1:]:
                    if "gunicorn" in " ".join(worker.cmdline()):
                        worker.kill()
                        killed.add(worker.pid)
            time.sleep(0.05)
        assert instance.process.wait(timeout=60) == 1
    finally:
        if instance.process.poll() is None:
            instance.stop()
    assert len(killed) >= 6
    assert "Workers of every slot ended again and again" in " ".join(instance.log().split())
    assert "Traceback" not in instance.log()
