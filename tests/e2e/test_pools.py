"""Pools as processes: leases, crashes, hangs, devices and refused starts; `test_lifecycle.py` has their changes."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

from shared.masters.run_directory import MARKER_FILE, prepare_run_directory
from shared.plan import PLAN_FILE
from tests.chaos.rows.files import accepts_connections
from tests.e2e.harness import GUNICORN, PATIENCE_S, TERCET, Gunicorn, Tercet, free_port, running, serving, until
from tests.e2e.lifecycle import loaded
from tests.settings import make_settings


def slots_by_index(tercet: Tercet) -> dict[int, dict[str, object]]:
    return {slot["slot"]: slot for slot in tercet.wait_until_warm()}


def is_replaced(tercet: Tercet, index: int, old_pid: object) -> bool:
    slots = tercet.slots()
    return bool(slots and slots[index]["state"] == "warm" and slots[index]["pid"] != old_pid)


def test_killed_workers_are_replaced_in_their_slots_and_no_request_fails(
    short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = ["4", "7", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    with running(short_tmp_path, devices="cuda:0,cuda:1,cuda:2", compute="cpu", models="embedded") as tercet:
        first = slots_by_index(tercet)
        with loaded(tercet) as load:
            for victim in (1, 1, 0):
                before = slots_by_index(tercet)
                load.wait_for(5)
                os.kill(int(str(before[victim]["pid"])), signal.SIGKILL)
                until(partial(is_replaced, tercet, victim, before[victim]["pid"]), 30, f"slot {victim} warm again")
                load.wait_for(5)
        after = slots_by_index(tercet)
        assert [after[index]["device"] for index in after] == [first[index]["device"] for index in first]
        started = {line["pid"]: line for line in tercet.events("worker_started")}
        assert len(started) == 6
        for line in started.values():
            index = line["slot"]
            assert line["device"] == f"cuda:{index}"
            assert (line["cuda_visible_devices"], line["omp_num_threads"]) == (gpus[index], "1")


def test_workers_listen_only_on_private_sockets(tercet: Tercet) -> None:
    for index in range(2):
        mode = (tercet.run_dir / f"slot-{index}.sock").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    assert stat.S_IMODE(tercet.run_dir.stat().st_mode) == 0o700
    for process in tercet.processes()["workers"]:
        assert process.net_connections("tcp") == []
    ports = {connection.laddr.port for connection in tercet.processes()["gateway"][0].net_connections("tcp")}
    assert ports == {tercet.port}
    # A core dump would hold prompts and keys.
    for process in (process for processes in tercet.processes().values() for process in processes):
        assert process.rlimit(psutil.RLIMIT_CORE)[0] == 0


def test_a_pool_without_supervisor_keeps_its_sockets_and_serves_a_gateway_that_starts_later(
    short_tmp_path: Path,
) -> None:
    """Under systemd it holds no supervisor's lock, only its own."""
    gateway = Gunicorn(short_tmp_path, "gateway")
    with serving(Gunicorn(short_tmp_path, "workers")) as pool:
        before = {path.name for path in pool.run_dir.iterdir()}
        assert_refused(Tercet(short_tmp_path, run_dir=str(pool.run_dir)).run("serve"), "is in use by process")
        assert before <= {path.name for path in pool.run_dir.iterdir()}
        with serving(gateway):
            gateway.wait_until_warm()
            assert len(gateway.ask()["sentences"]) == 3
    assert gateway.events("socket_restored") == []  # the log is that of both


def test_a_pool_without_supervisor_heals_and_keeps_its_lock(short_tmp_path: Path) -> None:
    with serving(Gunicorn(short_tmp_path, "workers")) as pool:
        shutil.rmtree(pool.run_dir)
        path = pool.run_dir / "slot-0.sock"
        until(lambda: accepts_connections(path), 60, "the worker accepts again")
        assert (pool.run_dir.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
        [worker] = psutil.Process(pool.process.pid).children()
        worker.kill()
        until(lambda: not worker.is_running() and accepts_connections(path), 60, "its successor accepts")
        assert (pool.run_dir / PLAN_FILE).is_file()
        assert_refused(pool.run(program=GUNICORN), "is in use by process")


def test_a_stopped_worker_is_replaced_and_its_requests_answered(short_tmp_path: Path) -> None:
    with running(short_tmp_path, models="embedded*2") as tercet:
        stopped = int(str(slots_by_index(tercet)[0]["pid"]))
        os.kill(stopped, signal.SIGSTOP)
        for _ in range(4):
            answer = tercet.ask(max_time=3)
            assert len(answer["sentences"]) == 3
        until(lambda: not psutil.pid_exists(stopped), 30, "the stopped worker replaced")
        assert int(str(slots_by_index(tercet)[0]["pid"])) != stopped


def test_unequal_slots_share_load_by_their_speed(short_tmp_path: Path) -> None:
    """Each request starts while all before it run; beside such delays the machine's own speed hardly counts."""
    with (
        running(short_tmp_path, models="embedded*2", test_step_delay_ms="0=50,1=250") as tercet,
        ExitStack() as streams,
    ):
        for number in range(12):  # each a document of its own, which has no slot yet
            body = {"context": f"{number}. The old man", "length": 256, "n": 1, "temperature": 0, "stream": True}
            assert streams.enter_context(tercet.client.stream("POST", "/autocomplete", json=body)).status_code == 200
        page = tercet.ready()
        assert page is not None
        fast_ms, slow_ms = (slot["ms_per_token"] for slot in page["slots"])
        assert slow_ms > 1.5 * fast_ms
        until(lambda: sum(slot["in_flight"] for slot in tercet.slots()) == 12, 5, "all requests in flight")
        assert tercet.slots()[0]["in_flight"] == pytest.approx(12 * slow_ms / (fast_ms + slow_ms), abs=1)


def test_ttin_and_ttou_beyond_the_plan_are_refused(tercet: Tercet) -> None:
    master, *workers = tercet.processes()["workers"]
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        master.send_signal(number)
    until(lambda: tercet.log().count("TTIN and TTOU are refused") >= 1, PATIENCE_S, "the refusal logged")
    time.sleep(0.5)
    assert master.children() == workers


def assert_refused(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert sentence in " ".join(output.split()), output
    assert "Traceback" not in output


def test_a_refused_start_prints_one_sentence(short_tmp_path: Path, tercet: Tercet) -> None:
    cases = [
        ({"bind": f"127.0.0.1:{tercet.port}"}, "set TERCET_BIND to another host:port"),
        ({"run_dir": str(tercet.run_dir)}, "is in use by process"),
        ({"modles": "small"}, "TERCET_MODLES is not a setting"),
    ]
    for settings, sentence in cases:
        assert_refused(Tercet(short_tmp_path, **settings).run("serve"), sentence)


def test_a_full_disk_refuses_the_start_with_one_sentence(short_tmp_path: Path) -> None:
    """A limit of the size of files fails each write of the run directory, as a full disk does."""
    done = Tercet(short_tmp_path).run("serve", program=["prlimit", "--fsize=0", *TERCET])
    assert_refused(done, "set TERCET_RUN_DIR to a directory with free space")


def test_a_refused_start_removes_no_file_of_others(short_tmp_path: Path) -> None:
    """Guards against removal by pattern: a start that fails must not empty a directory, even one with our marker."""
    names = ("app.lock", "app.sock", "plan.json", "draining", "slot-7.sock")
    ours = prepare_run_directory(make_settings(run_dir=short_tmp_path / "ours"))
    for name in names:
        (ours / name).write_text("kept")
    assert_refused(Tercet(short_tmp_path, run_dir=str(ours), devices="cuda:7").run("serve"), "names cuda:7, but")
    (ours / MARKER_FILE).unlink()
    assert {path.name: path.read_text() for path in ours.iterdir()} == dict.fromkeys(names, "kept")


def test_gunicorn_without_a_supervisor_refuses_a_port_in_use(short_tmp_path: Path, tercet: Tercet) -> None:
    done = tercet.run(program=GUNICORN, TERCET_RUN_DIR=str(short_tmp_path / "r"), TERCET_ROLE="gateway")
    assert_refused(done, "set TERCET_BIND")


def test_complete_asks_the_server_that_it_is_given_and_says_how_without_one(tercet: Tercet) -> None:
    elsewhere = f"127.0.0.1:{free_port()}"
    command = ("complete", "Once upon a time", "--seed", "1")
    done = tercet.run(*command, TERCET_BIND=elsewhere)
    assert done.returncode == 1
    for hint in (f"http://{elsewhere}", "tercet serve", "--url"):
        assert hint in done.stderr
    for options in ((), ("--url", f"{tercet.url}/")):
        done = tercet.run(*command, *options, **({"TERCET_BIND": elsewhere} if options else {}))
        assert (done.returncode, done.stdout.count("Once upon a time")) == (0, 3)


def test_the_ready_message_names_the_page(tercet: Tercet) -> None:
    assert f"Write at {tercet.url}/ " in tercet.log()
