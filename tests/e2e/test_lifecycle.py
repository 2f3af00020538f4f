"""Reloads, another checkpoint, kills and stops of a running instance under load; each leaves the instance warm.

tests/chaos/test_short.py has signals at any moment, storms of SIGHUP, and deaths after refused reloads.
"""

from __future__ import annotations

import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch

from tests.chaos.http_client import completion_request, exchange, find_fault
from tests.chaos.load import Load, count_failures
from tests.chaos.measure import Jitter
from tests.chaos.rows.workers import pids
from tests.e2e.harness import ROOT, START_S, Tercet, run_alone, running, until
from tests.e2e.lifecycle import NUM_CLIENTS, PAUSE_S, REFUSALS, loaded, num_reloads, start_behind, wait_for_start

GREEDY: dict[str, Any] = {"temperature": 0, "length": 12}
GRACE_S = 6.0
DEADLINE_S = 120  # of the requests: also a slow machine starts a worker within it
# Tokens of a request that ends within the grace of a stop, and of a request that does not.
SHORT, LONG = 25, 256
CONTEXT = "The old man looked at the sea and"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints that answer differently, and a link to the first: `a`, `b`, `mine`."""
    path = tmp_path_factory.mktemp("t")
    make_checkpoint(path / "a")
    make_checkpoint(path / "b", scale=1.5)
    (path / "mine").symlink_to(path / "a")
    return path


@pytest.fixture(scope="module")
def tercet(directory: Path) -> Iterator[Tercet]:
    """Two slots of a checkpoint behind a link. A branch of each request goes to each slot."""
    models = f"mine={directory / 'mine'}*2"
    with running(directory, models=models, placement="spread", timeout_s=str(DEADLINE_S)) as instance:
        yield instance


def make_checkpoint(directory: Path, *, scale: float = 1.0) -> Path:
    """A copy of the embedded checkpoint; `scale` multiplies its final norm, NaN makes it one that is refused."""
    shutil.copytree(ROOT / "workers/checkpoints/embedded", directory)
    weights = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    name = next(name for name in tensors if name.endswith("h.0.ln_1.weight"))
    tensors[name] = tensors[name] * scale
    safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    return directory


def processes(tercet: Tercet) -> list[psutil.Process]:
    return [process for role in tercet.processes().values() for process in role]


def are_gone(processes: list[int]) -> bool:
    return not any(map(psutil.pid_exists, processes))


def values(answer: dict[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(sentence["value"] for sentence in answer["sentences"]))


def point(link: Path, directory: Path) -> None:
    """Let a symbolic link point to a directory, atomically."""
    temporary = link.with_suffix(".new")
    temporary.symlink_to(directory)
    temporary.replace(link)


def reload_all_slots(tercet: Tercet, master: psutil.Process, outcome: str, num_slots: int | None = None) -> None:
    """SIGHUP, and wait until the reload of each slot is reported."""
    wanted = len(tercet.events("reload_finished")) + (len(tercet.slots()) if num_slots is None else num_slots)
    master.send_signal(signal.SIGHUP)
    until(lambda: len(tercet.events("reload_finished")) >= wanted, START_S, "the reload is reported")
    assert {event["outcome"] for event in tercet.events("reload_finished")[wanted - 1 :]} == {outcome}


def test_a_failed_reload_changes_nothing_and_the_next_works(tercet: Tercet, directory: Path) -> None:
    """Reloads whose new workers cannot load, and reloads whose configuration is refused, of all slots."""
    weights = directory / "a" / "model.safetensors"
    good = weights.read_bytes()
    masters = {role: tercet.processes()[role][0] for role in ("workers", "gateway")}
    before = pids(tercet)
    with loaded(tercet):
        weights.write_bytes(b"garbage")
        reload_all_slots(tercet, masters["workers"], "failed")
        # A missing file would be made again.
        restore = REFUSALS["a directory that others may write"](tercet)
        gateway = tercet.processes()["gateway"]
        reload_all_slots(tercet, masters["workers"], "failed")
        reload_all_slots(tercet, masters["gateway"], "failed", num_slots=1)
        assert tercet.processes()["gateway"] == gateway
        restore()
        weights.write_bytes(good)
    assert pids(tercet) == before
    with loaded(tercet):  # the next reload works as ever
        reload_all_slots(tercet, masters["workers"], "succeeded")
        until(partial(are_gone, before), START_S, "the old workers stopped")
    assert {role: tercet.processes()[role][0] for role in masters} == masters
    assert 'tercet_slot_reloads_total{outcome="failed",slot="0"}' in tercet.client.get("/metrics").text


def test_hups_during_a_start_are_one_reload_after_it(short_tmp_path: Path) -> None:
    instance = Tercet(short_tmp_path)
    instance.start()
    try:
        until(instance.run_dir.exists, 60, "the supervisor runs")
        while not instance.num_starts:
            assert instance.process.poll() is None, instance.log()
            instance.process.send_signal(signal.SIGHUP)
            time.sleep(0.1)
        until(lambda: num_reloads(instance, 0) >= Counter(workers=1, gateway=1), START_S, "a reload")
        assert "master_died" not in instance.log()
    finally:
        assert instance.stop() == 0


def test_a_rolling_change_of_model_fails_no_request_and_mixes_no_answer(tercet: Tercet, directory: Path) -> None:
    def answer() -> tuple[str, ...]:
        return values(tercet.ask(CONTEXT, **GREEDY))

    before, old_pids = answer(), pids(tercet)
    request = completion_request(CONTEXT, **GREEDY)
    load = Load(tercet.port, NUM_CLIENTS, make_request=lambda _: request, pause_s=PAUSE_S)
    point(directory / "mine", directory / "b")
    with load.running():
        done = run_alone("reload", TERCET_RUN_DIR=tercet.environ["TERCET_RUN_DIR"])  # which is all that it needs
        assert done.returncode == 0, done.stdout + done.stderr
        load.wait_for(10)
    assert not count_failures(load.answers), count_failures(load.answers)
    after = answer()
    assert before != after
    assert {values(each.document()) for each in load.answers} == {before, after}
    assert not set(old_pids) & set(pids(tercet))


def test_a_rolling_change_to_a_broken_model_stops_at_the_first_slot(tercet: Tercet, directory: Path) -> None:
    """One slot fails and goes back, the others are untouched."""
    link = directory / "mine"
    was = link.resolve()
    before = pids(tercet)
    point(link, make_checkpoint(directory / "broken", scale=float("nan")))
    with loaded(tercet):
        done = tercet.run("reload")
        assert done.returncode == 1, done.stdout
        assert "Slot 0 (mine on cpu) could not be reloaded" in " ".join(done.stderr.split()), done.stderr
        point(link, was)
        after = pids(tercet)
    assert after[1:] == before[1:]
    assert after[0] != before[0]


def test_tercet_reload_refuses_what_it_cannot_change(tercet: Tercet) -> None:
    done = tercet.run("reload", "--model", "other")
    assert (done.returncode, "served are mine" in done.stderr) == (1, True), done.stderr


def test_dead_masters_are_replaced_and_no_request_fails(tercet: Tercet) -> None:
    """The gateway's listening socket stays; what arrives between two gateways waits in it, and is answered."""

    def has_new_master(role: str, old: psutil.Process) -> bool:
        return bool(tercet.processes().get(role, [old])[0] != old)

    for role in ("gateway", "workers"):
        old = tercet.processes()[role][0]
        with loaded(tercet):
            old.kill()
            until(partial(has_new_master, role, old), START_S, f"a new {role} master")
            tercet.wait_until_warm()


def test_a_killed_supervisor_is_followed_by_a_new_one_at_once(tercet: Tercet) -> None:
    """No accepted request is reset."""
    num_starts = tercet.num_starts
    family = processes(tercet)[1:]
    load = Load(tercet.port, NUM_CLIENTS, pause_s=PAUSE_S)
    with load.running():
        load.wait_for(5)
        tercet.process.kill()
        tercet.process.wait()
        tercet.start()
        wait_for_start(tercet, num_starts + 1)
        load.wait_for(5)
    assert [process for process in family if process.is_running()] == []
    # No connection in the time between is a connection refused; every other failure is a broken promise.
    lost = [answer for answer in load.answers if answer.status == 0 and b"ConnectionRefused" not in answer.body]
    assert lost == []
    assert {answer.status for answer in load.answers} <= {0, 200, 503}
    assert load.answers[-1].status == 200


def test_a_stop_and_a_start_behind_a_kept_socket_lose_nothing_and_a_stop_keeps_its_grace(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    instance = Tercet(
        tmp_path_factory.mktemp("t"),
        models="embedded*2",
        timeout_s=str(DEADLINE_S),
        grace_s=str(GRACE_S),
        drain_s="0.5",
        test_step_delay_ms="0=40,1=40",
    )
    with socket.create_server(("127.0.0.1", instance.port), backlog=128) as listener:
        start_behind(instance, listener)
        instance.wait_until_announced()
        with loaded(instance):
            num_starts = instance.num_starts
            instance.process.terminate()
            assert instance.process.wait(timeout=40) == 0
            start_behind(instance, listener)
            wait_for_start(instance, num_starts + 1)
        stop_under_load(instance)
        instance.client.close()
    assert not instance.run_dir.exists()


def stop_under_load(tercet: Tercet) -> None:
    """SIGTERM while requests run that end in time and requests that do not."""
    family = processes(tercet)
    answers = []
    threads = [
        threading.Thread(
            target=lambda length=length: answers.append(
                (length, exchange(tercet.port, completion_request(length=length)))
            )
        )
        for length in (SHORT, SHORT, LONG)
    ]
    for thread in threads:
        thread.start()
    until(lambda: sum(slot["in_flight"] for slot in tercet.slots()) >= 3 * len(threads), 10, "in flight")
    with Jitter() as jitter:
        started_at = time.monotonic()
        tercet.process.terminate()
        page = until(lambda: (ready := tercet.client.get("/health/ready")).status_code == 503 and ready, 2, "not ready")
        assert page.json()["status"] == "draining"
        assert tercet.process.wait(timeout=GRACE_S + 10) == 0
        exit_s = time.monotonic() - started_at
    # The instance's processes end one after another, and each waits for its turn on a busy machine.
    assert exit_s < GRACE_S + 1.0 + 10 * jitter.ms(1.0) / 1e3
    assert [process for process in family if process.is_running()] == []
    for thread in threads:
        thread.join()
    short = [answer for length, answer in answers if length == SHORT]
    assert {answer.status for answer in short} == {200}, [(answer.status, answer.body) for answer in short]
    assert {find_fault(answer) for length, answer in answers if length == LONG} == {""}
