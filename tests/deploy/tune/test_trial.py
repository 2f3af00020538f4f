"""A turn that other processes disturb is repeated."""

from __future__ import annotations

import os
import subprocess
import sys

from deploy.bench.harness.clients import LoadResult, Reply
from deploy.bench.harness.workload import Subject, W
from deploy.tune.results import Load
from deploy.tune.trial import MAX_ATTEMPTS, QUIET_SHARE, OthersMeter, Trial
from shared.settings import ModelSpec
from workers.checkpoints.resolve import resolve

BURN_S = 0.4
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass"


def burn(*, is_detached: bool) -> None:
    """Uses `BURN_S` of CPU time in a process that is a child of this one, or no descendant any more."""
    command = [sys.executable, "-c", BURN]
    if is_detached:  # its parent ends at once; the pipe's end tells when it has ended itself
        command = [sys.executable, "-c", f"import subprocess; subprocess.Popen({command!r})"]
    subprocess.run(command, stdout=subprocess.PIPE, check=True)


class BusyNeighbour:
    """Clients whose turns are disturbed `number` times by a process that they have not started."""

    def __init__(self, number: int) -> None:
        self.number, self.num_turns = number, 0

    def call(self, method: str, clients: int, seconds: float) -> LoadResult:
        assert (method, clients, seconds) == ("send_for", 2, 0.1)
        burn(is_detached=self.num_turns < self.number)
        self.num_turns += 1
        return LoadResult([Reply(200, float(self.num_turns))], 1.0, 0.0)


def test_other_processes_are_metered_and_own_ones_are_not() -> None:
    """Other load of the machine only adds; so of own processes the least of several attempts is taken."""
    own = []
    for _ in range(5):
        meter = OthersMeter()
        burn(is_detached=False)
        own.append(meter.share())
    meter = OthersMeter()
    burn(is_detached=True)
    others = meter.share()
    assert others > 0
    assert min(own) < others * 1.5 or min(own) < 0.25 / (os.cpu_count() or 1)


def test_a_disturbed_turn_is_repeated_and_the_least_disturbed_counts() -> None:
    trial = Trial(ModelSpec("embedded"), Subject.of(resolve("embedded")), False, W, {}, [2], 0.1)
    clients = BusyNeighbour(MAX_ATTEMPTS + 1)
    found = trial.run(clients, Load(clients=2))  # type: ignore[arg-type]
    assert clients.num_turns == MAX_ATTEMPTS
    assert found.others_share > QUIET_SHARE
