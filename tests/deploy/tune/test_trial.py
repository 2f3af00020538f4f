"""A turn that other processes disturb is repeated."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deploy.load.clients import LoadResult, Reply
from deploy.load.workload import Subject, W
from deploy.tune.results import Load
from deploy.tune.trial import OthersMeter, Trial
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


def test_other_processes_are_metered_and_own_ones_are_not() -> None:
    """What else runs on the machine only adds: of several attempts the least counts."""
    meter = OthersMeter()
    burn(is_detached=True)
    assert meter.cpu_s() > 0.9 * BURN_S
    assert 0 < meter.share() <= 1
    own = []
    for _ in range(5):
        meter = OthersMeter()
        burn(is_detached=False)
        own.append(meter.cpu_s())
    assert min(own) < 0.9 * BURN_S


class Clients:
    """Counts its turns in the latencies of its replies."""

    num_turns = 0

    def call(self, method: str, num_clients: int, seconds: float) -> LoadResult:
        assert (method, num_clients, seconds) == ("send_for", 2, 0.1)
        self.num_turns += 1
        return LoadResult([Reply(200, float(self.num_turns))], 1.0, 0.0)


@pytest.mark.parametrize(
    ("shares", "num_turns", "chosen"), [([0.05], 1, 1), ([0.5, 0.02], 2, 2), ([0.4, 0.2, 0.3], 3, 2)]
)
def test_a_disturbed_turn_is_repeated_and_the_least_disturbed_counts(
    shares: list[float], num_turns: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter(shares)
    monkeypatch.setattr(OthersMeter, "share", lambda _self: next(readings))
    trial = Trial(ModelSpec("embedded"), Subject.of(resolve("embedded")), False, W, {}, [2], None, 0.1)
    clients = Clients()
    found = trial.run(clients, Load(clients=2))  # type: ignore[arg-type]
    assert clients.num_turns == num_turns
    assert (found.mean_ms, found.others_share) == (chosen, min(shares))
