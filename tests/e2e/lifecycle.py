"""Changes of a running instance under load: reloads, another checkpoint, kills, stops. Each function takes a count.

The functions assert what must hold whatever the count, and leave the instance warm, so that one instance serves them
all. `tests/e2e/test_lifecycle.py` runs each in its short form.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch

from tests.chaos.http_client import Endpoint, completion_request, exchange, find_fault
from tests.chaos.load import Load, count_failures
from tests.e2e.harness import ROOT, Tercet, until

NUM_CLIENTS = 3
GREEDY: dict[str, Any] = {"temperature": 0, "length": 12}
# Tokens of a request that ends within the grace of `stop_under_load`, and of a request that does not.
SHORT, LONG = 50, 256
CONTEXT = "The old man looked at the sea and"


@contextmanager
def loaded(tercet: Tercet, *, num_clients: int = NUM_CLIENTS) -> Iterator[Load]:
    """Load on the instance, in which no request may fail."""
    load = Load(Endpoint(tercet.port), num_clients)
    with load.running():
        load.wait_for(5)
        yield load
        load.wait_for(10)
    assert not count_failures(load.answers), count_failures(load.answers)


def processes(tercet: Tercet) -> list[psutil.Process]:
    return [process for role in tercet.processes().values() for process in role]


def wait_for_start(tercet: Tercet, num_starts: int) -> None:
    until(lambda: tercet.num_starts >= num_starts, 60, f"started {num_starts} times; {tercet.log()[-2000:]}")


def worker_pids(tercet: Tercet) -> list[int]:
    return [int(slot["pid"]) for slot in tercet.wait_until_warm()]


def reload_pools(tercet: Tercet, count: int) -> None:
    """R2: SIGHUP of either pool `count` times; each process is replaced and no request fails."""
    with loaded(tercet) as load:
        for _ in range(count):
            for role in ("workers", "gateway"):
                master, *before = tercet.processes()[role]
                master.send_signal(signal.SIGHUP)
                _, alive = psutil.wait_procs(before, timeout=40)
                assert alive == []
                assert tercet.processes()[role][0] == master
                load.wait_for(5)


def restart_behind_a_kept_socket(tercet: Tercet, listener: socket.socket, count: int) -> None:
    """R2: the instance, which was started by `start_behind`, stops and starts again; no request fails."""
    with loaded(tercet):
        for _ in range(count):
            num_starts = tercet.num_starts
            tercet.process.terminate()
            assert tercet.process.wait(timeout=40) == 0
            start_behind(tercet, listener)
            wait_for_start(tercet, num_starts + 1)


def start_behind(tercet: Tercet, listener: socket.socket) -> None:
    """Start `tercet serve` with a listening socket that the caller keeps, as systemd's socket units do."""
    program = (
        "import os, sys; os.dup2(int(sys.argv[1]), 3); "
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); "
        "os.execv(sys.executable, [sys.executable, '-m', 'deploy', 'serve'])"
    )
    number = listener.fileno()
    tercet.start(sys.executable, "-c", program, str(number), pass_fds=[number])


def stop_under_load(tercet: Tercet, *, grace_s: float) -> None:
    """R3: SIGTERM while requests run that end in time and requests that do not. The instance is stopped then.

    The instance needs a drain time that a probe can see, and `test_step_delay_ms` of 20.
    """
    family = processes(tercet)
    answers = []
    threads = [
        threading.Thread(
            target=lambda length=length: answers.append(
                (length, exchange(Endpoint(tercet.port), completion_request(length=length)))
            )
        )
        for length in (SHORT, SHORT, LONG)
    ]
    for thread in threads:
        thread.start()
    until(lambda: sum(slot["in_flight"] for slot in tercet.slots()) >= 3 * len(threads), 10, "in flight")
    started_at = time.monotonic()
    tercet.process.terminate()
    page = until(lambda: (ready := tercet.client.get("/health/ready")).status_code == 503 and ready, 2, "not ready")
    assert page.json()["status"] == "draining"
    assert tercet.process.wait(timeout=grace_s + 10) == 0
    assert time.monotonic() - started_at < grace_s + 1.0
    assert [process for process in family if process.is_running()] == []
    for thread in threads:
        thread.join()
    short = [answer for length, answer in answers if length == SHORT]
    assert {answer.status for answer in short} == {200}, [(answer.status, answer.body) for answer in short]
    assert {find_fault(answer) for length, answer in answers if length == LONG} == {""}


def kill_the_supervisor(tercet: Tercet, count: int) -> None:
    """R20: `tercet serve` is killed under load and started again at once. No accepted request is reset."""
    for _ in range(count):
        num_starts = tercet.num_starts
        family = processes(tercet)[1:]
        load = Load(Endpoint(tercet.port), NUM_CLIENTS)
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


def kill_masters(tercet: Tercet, count: int) -> None:
    """Each master is killed under load. The gateway's listening socket stays; new masters serve."""
    for _ in range(count):
        for role in ("gateway", "workers"):
            old = tercet.processes()[role][0]
            load = Load(Endpoint(tercet.port), NUM_CLIENTS)
            with load.running():
                load.wait_for(5)
                old.kill()
                until(partial(_has_new_master, tercet, role, old), 20, f"a new {role} master")
                tercet.wait_until_warm()
                load.wait_for(5)
            # Also what arrives between two gateways is answered: it waits in the listening socket.
            assert not count_failures(load.answers), (role, count_failures(load.answers))


def _has_new_master(tercet: Tercet, role: str, old: psutil.Process) -> bool:
    return bool(tercet.processes().get(role, [old])[0] != old)


def _are_gone(pids: list[int]) -> bool:
    return not any(map(psutil.pid_exists, pids))


def fail_reloads(tercet: Tercet, weights: Path, count: int) -> None:
    """R21: reloads whose new workers cannot load, and reloads whose configuration is refused, of all slots.

    Args:
        weights: the file of the model's weights, which is replaced by garbage for a while.
    """
    good = weights.read_bytes()
    plan = tercet.run_dir / "plan.json"
    masters = {role: tercet.processes()[role][0] for role in ("workers", "gateway")}
    for _ in range(count):
        before = worker_pids(tercet)
        with loaded(tercet):
            weights.write_bytes(b"garbage")
            _reload_all_slots(tercet, masters["workers"], "failed")
            # Without a plan, a master makes it, which now is refused.
            hidden = plan.rename(plan.with_suffix(".hidden"))
            gateway = tercet.processes()["gateway"]
            _reload_all_slots(tercet, masters["workers"], "failed")
            _reload_all_slots(tercet, masters["gateway"], "failed", num_slots=1)
            assert tercet.processes()["gateway"] == gateway
            hidden.rename(plan)
            weights.write_bytes(good)
        assert worker_pids(tercet) == before
        with loaded(tercet):  # the next reload works as ever
            _reload_all_slots(tercet, masters["workers"], "succeeded")
            until(partial(_are_gone, before), 20, "the old workers stopped")
    assert {role: tercet.processes()[role][0] for role in masters} == masters
    assert 'tercet_slot_reloads_total{outcome="failed",slot="0"}' in tercet.client.get("/metrics").text


def _reload_all_slots(tercet: Tercet, master: psutil.Process, outcome: str, num_slots: int | None = None) -> None:
    """SIGHUP, and wait until the reload of each slot is reported."""
    wanted = len(tercet.events("reload_finished")) + (len(tercet.slots()) if num_slots is None else num_slots)
    master.send_signal(signal.SIGHUP)
    until(lambda: len(tercet.events("reload_finished")) >= wanted, 90, "the reload is reported")
    assert {event["outcome"] for event in tercet.events("reload_finished")[wanted - 1 :]} == {outcome}


def tercet_reload(tercet: Tercet, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy", "reload", *arguments],
        cwd=ROOT, env=tercet.environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def change_model(tercet: Tercet, link: Path, directories: tuple[Path, Path], count: int) -> None:
    """R10: the link from which the model is served changes to the other directory, slot by slot under load.

    Args:
        link: points to the first directory at the start, and again at the end if the count is even.
        directories: two checkpoints that answer differently.
    """

    def answer() -> tuple[str, ...]:
        response = tercet.client.post("/autocomplete", json={"context": CONTEXT, **GREEDY})
        assert response.status_code == 200, response.text
        return _values(response.json())

    for turn in range(count):
        before, old_pids = answer(), worker_pids(tercet)
        load = Load(Endpoint(tercet.port), NUM_CLIENTS, make_request=lambda _: completion_request(CONTEXT, **GREEDY))
        point(link, directories[(turn + 1) % 2])
        with load.running():
            done = tercet_reload(tercet)
            assert done.returncode == 0, done.stdout + done.stderr
            load.wait_for(10)
        assert not count_failures(load.answers), count_failures(load.answers)
        after = answer()
        assert before != after
        assert {_values(each.document()) for each in load.answers} == {before, after}
        assert not set(old_pids) & set(worker_pids(tercet))


def refuse_a_broken_model(tercet: Tercet, link: Path, broken: Path) -> None:
    """`tercet reload` to a checkpoint that cannot be loaded: one slot fails and goes back, the others are untouched."""
    was = link.resolve()
    before = worker_pids(tercet)
    point(link, broken)
    with loaded(tercet):
        done = tercet_reload(tercet)
        assert done.returncode == 1, done.stdout
        assert "Slot 0 (mine on cpu) could not be reloaded" in " ".join(done.stderr.split()), done.stderr
        point(link, was)
        after = worker_pids(tercet)
    assert after[1:] == before[1:]
    assert after[0] != before[0]


def point(link: Path, directory: Path) -> None:
    """Let a symbolic link point to a directory, atomically."""
    temporary = link.with_suffix(".new")
    temporary.symlink_to(directory)
    temporary.replace(link)


def _values(answer: dict[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(sentence["value"] for sentence in answer["sentences"]))


def make_checkpoint(directory: Path, *, scale: float = 1.0) -> Path:
    """A copy of the embedded checkpoint; `scale` multiplies its final norm, NaN makes it one that is refused."""
    shutil.copytree(ROOT / "workers/checkpoints/embedded", directory)
    weights = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    name = next(name for name in tensors if name.endswith("h.0.ln_1.weight"))
    tensors[name] = tensors[name] * scale
    safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    return directory
