"""R30: files that are removed while the instance uses them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import time
from pathlib import Path

from tests.chaos.load import Load, count_failures
from tests.chaos.measure import Context, Findings
from tests.chaos.rows.workers import pids, wait_until_replaced
from tests.e2e.harness import Tercet, running, until

HEAL_S = 20.0
REPLACE_S = 120.0  # two models are loaded under load
MASTERS_PAUSE_S = 60.0  # `tercet serve` ends when more than three masters die within a minute


def remove_regular_files(run_dir: Path) -> None:
    for path in run_dir.iterdir():
        if stat.S_ISREG(path.lstat().st_mode):
            path.unlink()


def remove_sockets(run_dir: Path) -> None:
    for path in run_dir.glob("slot-*.sock"):
        path.unlink()


def is_whole(run_dir: Path) -> bool:
    """Whether the directory has its files, and a worker accepts at each socket."""
    return all((run_dir / name).is_file() for name in ("tercet-run-directory", "plan.json", "serve.lock")) and all(
        accepts_connections(run_dir / f"slot-{index}.sock") for index in range(2)
    )


def accepts_connections(path: Path) -> bool:
    """Whether a worker accepts a new connection at a socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        try:
            client.connect(str(path))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n")
            return client.recv(12) == b"HTTP/1.1 200"
        except OSError:
            return False


def kill_gateway(tercet: Tercet) -> None:
    _kill(tercet, [tercet.processes()["gateway"][1].pid])


def kill_worker(tercet: Tercet) -> None:
    _kill(tercet, pids(tercet)[:1])


def kill_masters(tercet: Tercet) -> None:
    for role in ("workers", "gateway"):
        _kill(tercet, [process.pid for process in tercet.processes()[role]])


def reload(tercet: Tercet) -> None:
    before = pids(tercet)
    tercet.process.send_signal(signal.SIGHUP)
    wait_until_replaced(tercet, before, REPLACE_S)


# What happens to the instance before it has healed by itself.
EVENTS = (
    (remove_regular_files, kill_gateway),
    (remove_sockets, kill_worker),
    (remove_sockets, reload),
    (shutil.rmtree, kill_masters),
)


def _kill(tercet: Tercet, victims: list[int]) -> None:
    """Kill the first of these processes, and wait until the others are replaced as well."""
    os.kill(victims[0], signal.SIGKILL)
    wait_until_replaced(tercet, victims, REPLACE_S)


def submit_job(tercet: Tercet) -> str:
    response = tercet.client.post("/jobs", json={"prompt": "The old man looked at the sea and"})
    return str(response.raise_for_status().json()["id"])


def lose_files(context: Context, findings: Findings) -> None:
    """R30. Each removal, then the death of a worker, under load; removals right before other events; then job files,
    each before a reload."""
    rounds = context.amount(1, 5)
    healed_s: list[float] = []
    jobs: list[str] = []
    base = context.directory()
    with running(base, models="embedded*2") as tercet:
        load = Load(tercet.port, 4, seed=context.seed, pause_s=context.pause_s)
        with load.running():
            load.wait_for(20)
            for _ in range(rounds):
                for remove in (remove_regular_files, remove_sockets, shutil.rmtree):
                    before = pids(tercet)
                    started_at = time.monotonic()
                    remove(tercet.run_dir)
                    until(lambda: is_whole(tercet.run_dir), HEAL_S, "all files are there again")
                    healed_s.append(time.monotonic() - started_at)
                    findings.require(pids(tercet) == before, "a worker was replaced")
                    _kill(tercet, before[:1])
            load.wait_for(20)
        for number in range(rounds):
            time.sleep(MASTERS_PAUSE_S if number else 0.0)
            for remove, event in EVENTS:
                remove(tercet.run_dir)
                event(tercet)
                tercet.ask()
                until(lambda: is_whole(tercet.run_dir), HEAL_S, "all files are there again")
            jobs.append(submit_job(tercet))
            for path in base.glob("jobs.sqlite3*"):
                path.unlink()
            jobs.append(submit_job(tercet))
            reload(tercet)
        lost = [job for job in jobs if tercet.client.get(f"/jobs/{job}").status_code != 200]
        reported = sum(event["jobs"] for event in tercet.events("job_file_lost"))
    findings.figures |= {"removals": (4 + len(EVENTS)) * rounds, "answers": len(load.answers), "jobs": len(jobs)}
    findings.none_of("failed requests", count_failures(load.answers))
    findings.require(jobs[-1] not in lost, "the new job file lost a job")
    findings.require(len(lost) == reported, f"{len(lost)} jobs were lost, {reported} by the log")
    findings.at_most("healed after s", max(healed_s), HEAL_S)
