"""Workers whose load ends in a device error: real processes, which their master replaces with growing pauses."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.e2e.harness import Gunicorn, Tercet, serving, until


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


def test_a_first_load_that_ends_the_worker_stops_the_start_with_its_reason(short_tmp_path: Path) -> None:
    instance = Tercet(short_tmp_path, test_load_faults="0=device")
    instance.start()
    try:
        assert instance.process.wait(timeout=60) != 0
    finally:
        if instance.process.poll() is None:
            instance.process.kill()
    assert "could not be loaded on cpu" in instance.log()
    assert "The device failed while the model was loaded" in instance.log()
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
