"""Workers whose load ends in a device error: real processes, which their master replaces with growing pauses."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import START_S, Gunicorn, Tercet, serving, until
from workers.checkpoints.resolve import EMBEDDED


def test_a_worker_that_dies_while_loading_is_replaced_with_growing_pauses(short_tmp_path: Path) -> None:
    """Without the pauses a broken driver would fork processes without end. Each ends with exit code 70."""
    with serving(Gunicorn(short_tmp_path, "workers", models="embedded*2", test_load_faults="1=device")) as instance:
        delays = until(lambda: len(instance.events("load_delayed")) == 2 and instance.events("load_delayed"), 60, "two")
        assert [(line["slot"], line["failures"], line["pause_s"]) for line in delays] == [(1, 1, 1.0), (1, 2, 2.0)]
        ends = instance.events("worker_ended")
        assert [line["exit_code"] for line in ends] == [70, 70]
        starts = [line["pid"] for line in instance.events("worker_started") if line["slot"] == 1]
        assert len(set(starts)) == 3
        failures = [line for line in instance.events("engine_failed") if line["kind"] == "device_error"]
        assert len(failures) == 2  # one for each process: none was tried again in it
        loaded = [line["slot"] for line in instance.events("model_loaded")]
        assert loaded.count(0) == 1  # the other slot serves on


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
