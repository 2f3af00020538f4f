"""Load on a running instance, starts behind a socket that the caller keeps, and reasons to refuse a reload."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from shared.masters.run_directory import MARKER_FILE
from shared.plan import PLAN_LOCK_FILE
from tests.chaos.load import Load, count_failures
from tests.e2e.harness import START_S, Tercet, until

# Clients pause: the workers that start share the cores with them, and with other tests.
NUM_CLIENTS, PAUSE_S = 3, 0.1


@contextmanager
def loaded(tercet: Tercet) -> Iterator[Load]:
    """Load on the instance, in which no request may fail."""
    load = Load(tercet.port, NUM_CLIENTS, pause_s=PAUSE_S)
    with load.running():
        load.wait_for(5)
        yield load
        load.wait_for(10)
    assert not count_failures(load.answers), count_failures(load.answers)


def wait_for_start(tercet: Tercet, num_starts: int) -> None:
    until(lambda: tercet.num_starts >= num_starts, START_S, f"started {num_starts} times; {tercet.log()[-2000:]}")


def num_reloads(tercet: Tercet, since: int) -> Counter[str]:
    """Reloads of slots that have finished, by the role of their master, without the first `since` of all."""
    return Counter(event["role"] for event in tercet.events("reload_finished")[since:])


def start_behind(tercet: Tercet, listener: socket.socket) -> None:
    """Start `tercet serve` with a listening socket that the caller keeps, as systemd's socket units do."""
    program = (
        "import os, sys; os.dup2(int(sys.argv[1]), 3); "
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); "
        "os.execv(sys.executable, [sys.executable, '-m', 'deploy', 'serve'])"
    )
    number = listener.fileno()
    tercet.start(sys.executable, "-c", program, str(number), pass_fds=[number])


def _damage_marker(tercet: Tercet) -> Callable[[], object]:
    """A marker that is only missing would be made again, even between the two lines here."""
    marker = tercet.run_dir / MARKER_FILE

    def is_damaged() -> bool:
        marker.unlink(missing_ok=True)
        try:
            marker.mkdir()
        except FileExistsError:
            return False
        return True

    until(is_damaged, 10, "a directory in the marker's place")
    return marker.rmdir


def _open_directory_to_others(tercet: Tercet) -> Callable[[], object]:
    tercet.run_dir.chmod(0o777)
    return partial(tercet.run_dir.chmod, 0o700)


def _block_plan_lock(tercet: Tercet) -> Callable[[], object]:
    lock = tercet.run_dir / PLAN_LOCK_FILE
    lock.unlink(missing_ok=True)
    lock.mkdir()
    return lock.rmdir


# Changes a running instance's run directory so that its masters refuse to reload; returns what undoes it.
Refusal = Callable[[Tercet], Callable[[], object]]
REFUSALS: dict[str, Refusal] = {
    "no file as marker": _damage_marker,
    "a directory that others may write": _open_directory_to_others,
    "no lock of the plan": _block_plan_lock,
}
