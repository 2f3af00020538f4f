"""What a signal does in each phase of a worker's life: in real processes, forked as a master forks them."""

from __future__ import annotations

import os
import select
import signal
import time

import pytest

from shared.masters.worker_life import LifePhase, WorkerLife, blocked_signals

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT)
IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGTTIN, signal.SIGTTOU)
EXIT_CODE = 9


class Worker:
    """A forked process that goes through the phases up to `until` and then waits for a signal to be recorded."""

    def __init__(self, until: LifePhase, signal_before: int = 0) -> None:
        self._said, said = os.pipe()
        master_handler = {number: signal.signal(number, lambda *_: None) for number in (*ENDING[:3], *IGNORED)}
        try:
            with blocked_signals():
                life = WorkerLife()
                self.pid = os.fork()
                if self.pid == 0:
                    try:
                        os.kill(os.getpid(), signal_before)  # 0 sends nothing
                        _live(life, until, said)
                    finally:
                        os._exit(1)
        finally:
            for number, handler in master_handler.items():
                signal.signal(number, handler)
        os.close(said)

    def wait_until_there(self) -> None:
        assert os.read(self._said, 1) == b"."

    def end(self) -> int:
        """The exit status, negative for a signal."""
        ready, _, _ = select.select([self._said], [], [], 20)  # until the process has closed its end
        if not ready:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._said)
        assert ready, "the process did not end"
        return os.waitstatus_to_exitcode(status)


def _live(life: WorkerLife, until: LifePhase, said: int) -> None:
    woken, wake = os.pipe()
    life.begin()
    if until >= LifePhase.LOADING:
        life.load(lambda: os.close(wake))
    if until >= LifePhase.WARM:
        life.warm()
    if until >= LifePhase.DRAINING:
        life.drain(1.0)
    os.write(said, b".")
    if until is LifePhase.IMPORTING or until is LifePhase.DRAINING:
        while True:  # an import, or a thread, that no handler can end
            time.sleep(0.01)
    # As in a main loop: a signal that comes just before a wait is handled after it.
    while not select.select([woken], [], [], 0.05)[0]:
        pass
    os._exit(EXIT_CODE if life.must_drain else 2)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("number", ENDING)
def test_an_import_is_ended_by_the_kernel_also_by_a_signal_between_it_and_the_fork(number: int, is_early: bool) -> None:
    worker = Worker(LifePhase.IMPORTING, signal_before=number if is_early else 0)
    if not is_early:
        worker.wait_until_there()
        os.kill(worker.pid, number)
    assert worker.end() == -number


@pytest.mark.parametrize("phase", [LifePhase.LOADING, LifePhase.WARM])
@pytest.mark.parametrize("number", ENDING)
def test_a_loop_acts_on_term_and_the_other_signals_end_the_process_at_once(phase: LifePhase, number: int) -> None:
    worker = Worker(phase)
    worker.wait_until_there()
    os.kill(worker.pid, number)
    assert worker.end() == (EXIT_CODE if number == signal.SIGTERM else -number)


@pytest.mark.parametrize("phase", [LifePhase.IMPORTING, LifePhase.LOADING, LifePhase.WARM])
def test_signals_that_mean_the_master_do_nothing_in_a_worker(phase: LifePhase) -> None:
    worker = Worker(phase)
    worker.wait_until_there()
    for number in IGNORED:
        os.kill(worker.pid, number)
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.end() == (-signal.SIGTERM if phase is LifePhase.IMPORTING else EXIT_CODE)


def test_a_drain_that_hangs_is_ended_by_the_kernel() -> None:
    worker = Worker(LifePhase.DRAINING)
    worker.wait_until_there()
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.end() == -signal.SIGALRM


def test_phases_have_one_order() -> None:
    life = WorkerLife()
    life.phase = LifePhase.DRAINING
    with pytest.raises(AssertionError, match="DRAINING does not become WARM"):
        life.warm()
