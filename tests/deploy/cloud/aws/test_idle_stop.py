"""R18 on AWS: an instance that is idle powers itself off; no request around that is lost, and none is run twice.

The function, the gateway and its workers are the real ones. moto's EC2 has
no machine behind an instance, so a thread of the test plays one: systemd, which starts `tercet serve` at boot and after
an exit, the time that a shutdown takes, and EventBridge, which reports it to the function. A second stands for the
minute between scheduled sweeps.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from deploy.cloud.aws.wake.handler import SweepFailed
from tests.deploy.cloud.aws.cloud import Cloud
from tests.deploy.cloud.aws.function import STOPPED, Answer, Function, deployed_function, in_state
from tests.deploy.cloud.aws.test_power_off import IDLE_STATUS
from tests.e2e.harness import Background, Tercet, until

POLL_S = 0.05
# From the request to power off until EC2 says `stopping`, and from there until it says `stopped`.
SHUTDOWN_S = 0.2
STOPPING_S = 0.4
SWEEP_S = 1.0


class Machine(Background):
    """The machine of the instance, and what EventBridge does about it."""

    def __init__(self, function: Function, tercet: Tercet) -> None:
        super().__init__()
        self.num_power_offs = 0
        self.exit_codes: Counter[int] = Counter()
        self.failure: BaseException | None = None
        self._function = function
        self._tercet = tercet

    def run(self) -> None:
        try:
            while not self.is_over.is_set():
                self._live()
        except BaseException as error:
            self.failure = error
            raise

    def _live(self) -> None:
        """One life of the instance, from its start to its stop."""
        swept_at = time.monotonic()
        while self._function.state != "running":
            if self.is_over.wait(POLL_S):
                return
            if time.monotonic() - swept_at >= SWEEP_S:
                swept_at = time.monotonic()
                with suppress(SweepFailed):
                    self._function.sweep()
        while not self._has_powered_off():
            if self.is_over.is_set():
                return
        self.num_power_offs += 1
        time.sleep(SHUTDOWN_S)
        cloud = self._function.cloud
        cloud.rewrite("DescribeInstances", in_state("stopping"), times=1_000_000)
        time.sleep(STOPPING_S)
        self._function.stop_instance()
        cloud.forget()
        with suppress(SweepFailed):
            self._function.sweep(STOPPED)

    def _has_powered_off(self) -> bool:
        """Run the service once, as systemd does; False: it is to be started again."""
        self._tercet.start(sys.executable, "-m", "deploy", "serve", "--idle-status", str(IDLE_STATUS))
        process = self._tercet.process
        while process.poll() is None:
            if self.is_over.wait(POLL_S):
                process.terminate()
                process.wait(timeout=40)
                return False
        code = process.wait()
        self.exit_codes[code] += 1
        return code == IDLE_STATUS


def wait_for_results(function: Function, machine: Machine, ids: list[str]) -> list[Answer]:
    """Read each job until it is final."""
    final: list[Answer] = []
    for job_id in ids:

        def read(job_id: str = job_id) -> Answer | None:
            assert machine.failure is None
            answer = function.get(job_id)
            assert answer.status == 200, answer
            time.sleep(0.05)
            return answer if answer.body["state"] not in {"queued", "running"} else None

        final.append(until(read, 60, "the job is final"))
    return final


@pytest.mark.deploy
@pytest.mark.parametrize(("num_stops", "seed"), [(9, seed) for seed in range(1, 7)])
def test_requests_around_an_idle_stop_are_all_answered_once(
    running: Cloud, tmp_path: Path, num_stops: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    with deployed_function(running, tmp_path / "archive") as function, ThreadPoolExecutor(8) as threads:
        function.stop_instance()
        running.forget()
        tercet = Tercet(tmp_path, idle_stop_s="1.5", jobs=function.job_store)
        tercet.environ |= running.environ
        with Machine(function, tercet) as machine:

            def send(number: int) -> str:
                body: dict[str, Any] = {"prompt": f"Door {number} opened, and", "num_samples": 1, "length": 2}
                answer = function.post(body, **{"idempotency-key": f"{number}"})
                assert answer.status == 202, answer
                return str(answer.body["id"])

            ids = [send(0)]
            answers = wait_for_results(function, machine, ids)
            for stop in range(1, num_stops + 1):

                def has_stopped(stop: int = stop) -> bool:
                    return len(tercet.events("idle_stop_began")) >= stop

                until(has_stopped, 60, "the idle stop began")
                sent: list[Future[str]] = []
                # During the drain, the shutdown, `stopping` or `stopped`.
                time.sleep(rng.uniform(0.0, 2.0))
                for _ in range(4):
                    time.sleep(rng.uniform(0.0, 0.5))
                    sent.append(threads.submit(send, len(ids) + len(sent)))
                new = [future.result() for future in sent]
                ids += new
                answers += wait_for_results(function, machine, new)
        tercet.client.close()
    assert {answer.body["state"] for answer in answers} == {"succeeded"}, answers
    assert all(answer.body["result"]["sentences"] for answer in answers)
    assert len(set(ids)) == len(ids) == 1 + 4 * num_stops
    finished = Counter(event["job"] for event in tercet.events("job_finished"))
    assert finished == Counter(job_id[:8] for job_id in ids)
    assert set(machine.exit_codes) == {IDLE_STATUS}
    assert machine.exit_codes.total() >= num_stops
    with capsys.disabled():
        print(
            f"\nidle stops {machine.exit_codes.total()}; powered off {machine.num_power_offs}; requests {len(ids)}, "
            f"answered {len(answers)}, computed {finished.total()}"
        )
