"""Reloads and failures on GPUs with little memory: real pools on the CPU, cards of a fake `nvidia-smi`."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from shared.masters.run_directory import prepare_run_directory
from tests.e2e.harness import Tercet, until
from tests.programs import gpu_row, write_program
from tests.settings import make_settings


@pytest.fixture
def two_cards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    """A worker on each of two cards. The first card holds no successor of its worker, the second holds one."""
    base = tmp_path_factory.mktemp("t")
    smi = base / "bin/nvidia-smi"
    small, larger = gpu_row("small card", memory="1500"), gpu_row("larger card", memory="3600", gpu="1, GPU-b")
    write_program(smi, f"echo '{small}'; echo '{larger}'")
    tercet = Tercet(base, devices="cuda:0,cuda:1", compute="cpu", models="embedded", cpu_threads="1", max_batch="8")
    tercet.environ["PATH"] = f"{smi.parent}:{tercet.environ['PATH']}"
    yield tercet
    assert tercet.stop() == 0
    assert not tercet.run_dir.exists()


def workers(tercet: Tercet) -> list[int]:
    return [int(slot["pid"]) for slot in tercet.slots()]


def states(tercet: Tercet) -> list[str]:
    return [slot["state"] for slot in tercet.slots()]


def test_a_failed_worker_and_reloads_where_memory_is_short(two_cards: Tercet) -> None:
    tercet = two_cards
    blocked = prepare_run_directory(make_settings(run_dir=tercet.run_dir)) / "cuda-1.lock"
    blocked.mkdir()  # the worker of cuda:1 cannot allocate
    tercet.start()
    until(lambda: "1 of 2 slots failed" in tercet.log(), 60, f"started; {tercet.log()[-3000:]}")
    assert "Slot 1 (embedded on cuda:1) is not warm and tries again:" in tercet.log()
    assert states(tercet)[0] == "warm"
    assert len(tercet.ask(n_samples=3)["sentences"]) == 3

    blocked.rmdir()
    until(lambda: states(tercet) == ["warm"] * 2, 30, "the failed slot recovered")

    before = workers(tercet)
    tercet.process.send_signal(signal.SIGHUP)
    until(
        lambda: workers(tercet)[1] != before[1] and states(tercet) == ["warm"] * 2,
        40,
        f"cuda:1 reloaded; {tercet.log()[-3000:]}",
    )
    assert workers(tercet)[0] == before[0]
    outcomes = {
        event["slot"]: (event["outcome"], event.get("reason", ""))
        for event in tercet.events("reload_finished")
        if event["role"] == "workers"
    }
    assert outcomes[1] == ("succeeded", "")
    assert outcomes[0][0] == "failed"
    assert "run `tercet reload`" in outcomes[0][1]
