"""`tercet tune --kernels`: what is measured, chosen, stored and said.

There is no GPU. Where steps are timed, either a function of the test names the times, or the stand-in for `torch.cuda`
serves: a rehearsal, whose times mean nothing.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from deploy.tune.kernels import (
    CANDIDATES,
    Measurement,
    choose,
    gpu_places,
    measure,
    store_choice,
    table,
)
from deploy.tune.step_timer import StepTimer
from shared.errors import StartError
from shared.plan import Model, Plan, Slot
from shared.run_directory import lock_run_directory
from shared.settings import Settings
from tests.workers.engine.cuda.fake_cuda import fake_cuda, process_environment
from workers.checkpoints.resolve import resolve
from workers.engine.cuda.kernel_choice import CHECK_FAILED, KernelChoice, choose_kernels
from workers.engine.cuda.kernel_store import Kernels, KernelStore, StoredChoice
from workers.engine.loader import read_config

ROOT = Path(__file__).parents[3]
ROWS = [1, 48]
FASTEST = {"torch": 200.0, "triton": 150.0, "fused": 100.0}


class ScriptedSteps:
    """`StepTimer`'s process, with results that a test chooses.

    Args:
        us: duration of a step by kernels.
        refused: kernels → what their check finds.
        fatal: (method, kernels) of calls that end the process.
    """

    def __init__(
        self, us: dict[str, float], refused: dict[str, str] | None = None, fatal: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.us, self.refused, self.fatal = us, refused or {}, fatal
        self.calls: list[tuple[Any, ...]] = []
        self.num_starts = 0

    def __enter__(self) -> ScriptedSteps:
        self.num_starts += 1
        return self

    def __exit__(self, *_: object) -> None: ...

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        if args and (method, args[0]) in self.fatal:
            raise StartError("deploy.tune.step_timer:StepTimer ended with exit code -11.\nTraceback")
        match method:
            case "describe":
                return "the key", "A GPU", "bf16"
            case "check":
                return self.refused.get(args[0])
            case "has_same_bits":
                return args[0] == "fused"
            case "replay":
                return self.us[args[0]] * (1 + args[1] / 100)
        return None


def measured(steps: ScriptedSteps, num_rounds: int = 3) -> Measurement:
    measurement = measure(lambda: steps, ROWS, num_rounds, 5, "a model", set())
    assert measurement is not None
    return measurement


def made(**step_us: float) -> Measurement:
    """A measurement with the same time for all batch sizes."""
    times: dict[Any, dict[int, float]] = {kernels: dict.fromkeys(ROWS, us) for kernels, us in step_us.items()}
    return Measurement("the key", "A GPU", "bf16", same_bits=dict.fromkeys(times, True), step_us=times)


def test_all_kernels_are_compared_and_timed_in_turns() -> None:
    steps = ScriptedSteps(FASTEST)
    measurement = measured(steps)
    assert measurement.rejected == {}
    assert measurement.same_bits == {"torch": False, "triton": False, "fused": True}
    assert measurement.step_us["triton"] == {1: 151.5, 48: 222.0}
    timed = [call[1:3] for call in steps.calls if call[0] == "replay"]
    assert timed == [(kernels, rows) for rows in ROWS for _ in range(3) for kernels in CANDIDATES]
    assert [call[1] for call in steps.calls if call[0] == "check"] == ["triton", "fused"]


def test_kernels_that_differ_from_plain_torch_are_not_timed() -> None:
    steps = ScriptedSteps(FASTEST, refused={"triton": "attend differs"})
    measurement = measured(steps)
    assert measurement.rejected == {"triton": "attend differs"}
    assert set(measurement.step_us) == {"torch", "fused"}
    assert ("capture", "triton", 48) not in steps.calls


@pytest.mark.parametrize("method", ["check", "has_same_bits", "capture", "replay"])
def test_kernels_that_end_the_process_are_measured_no_more(method: str) -> None:
    steps = ScriptedSteps(FASTEST, fatal=((method, "fused"),))
    measurement = measured(steps)
    assert steps.num_starts == 2
    assert measurement.rejected["fused"].startswith("its process ended (")
    assert "Traceback" not in measurement.rejected["fused"]
    assert set(measurement.step_us) == {"torch", "triton"}
    assert choose(measurement).status == "triton"


def test_both_kernels_may_end_the_process() -> None:
    measurement = measured(ScriptedSteps(FASTEST, fatal=(("check", "triton"), ("replay", "fused"))))
    assert set(measurement.rejected) == {"triton", "fused"}
    choice = choose(measurement)
    assert (choice.status, choice.reason) == ("torch", measurement.rejected["triton"])


@pytest.mark.parametrize("call", [("has_same_bits", "torch"), ("replay", "torch")])
def test_a_failure_of_plain_torch_ends_the_measurement(call: tuple[str, str]) -> None:
    with pytest.raises(StartError, match="exit code -11"):
        measured(ScriptedSteps(FASTEST, fatal=(call,)))


def test_a_second_gpu_of_the_same_model_is_not_measured_again() -> None:
    steps, seen = ScriptedSteps(FASTEST), {"the key"}
    assert measure(lambda: steps, ROWS, 1, 1, "a model", seen) is None
    assert steps.calls == [("describe",)]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"torch": 200, "triton": 150, "fused": 100}, "fused"),
        ({"torch": 200, "triton": 150, "fused": 148}, "triton"),  # within the noise
        ({"torch": 149, "triton": 150, "fused": 180}, "triton"),
        ({"torch": 100, "triton": 150, "fused": 180}, "torch"),
        ({"torch": 100, "triton": 150, "fused": 90}, "fused"),
        ({"torch": 100}, "torch"),
    ],
)
def test_the_fastest_is_chosen(times: dict[str, float], chosen: Kernels) -> None:
    assert choose(made(**times)).status == chosen


def test_no_batch_size_outweighs_the_others() -> None:
    measurement = made(torch=100, triton=100)
    measurement.step_us["fused"] = {1: 50, 48: 190}  # a geometric mean of 97; an arithmetic one of 120
    assert choose(measurement).status == "fused"


def test_what_changed_is_said_and_stored(tmp_path: Path) -> None:
    store = KernelStore(tmp_path)
    first = store_choice(store, made(torch=200, triton=150))
    assert "Stored: [bold]triton[/], where nothing was chosen before" in first
    stored = json.loads((tmp_path / "kernels.json").read_text())["choices"]["the key"]
    assert stored["step_us"] == {"torch": {"1": 200, "48": 200}, "triton": {"1": 150, "48": 150}}
    assert "as before. Seeded texts stay the same." in store_choice(store, made(torch=200, triton=160))
    changed = store_choice(store, made(torch=200, triton=150, fused=90))
    assert "[bold]fused[/] instead of triton. [yellow]Seeded texts on this model of GPU change" in changed
    choice = store.read("the key")
    assert choice is not None
    assert choice.step_us["fused"][48] == 90


def test_a_mark_of_an_ended_check_is_no_earlier_choice(tmp_path: Path) -> None:
    store = KernelStore(tmp_path)
    store.write("the key", StoredChoice("checking"))
    assert "where nothing was chosen before" in store_choice(store, made(torch=200, triton=150))


def test_a_directory_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Not stored" in store_choice(KernelStore(tmp_path / "file"), made(torch=200, triton=150))
    assert "Not stored" in store_choice(KernelStore(None), made(torch=200, triton=150))


def test_the_table_has_times_ratios_and_reasons() -> None:
    measurement = made(torch=200, triton=150)
    measurement.rejected["fused"] = "fused layers need compute capability 8.0"
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table(measurement, "small on cuda:0"))
    text = console.export_text()
    assert "150 µs (0.75 ×)" in text
    assert "fused layers need compute capability 8.0" in text


def plan_of(*devices: str) -> Plan:
    names = ("small", "medium")
    places = [(device, name) for device in devices for name in names for _ in range(2)]
    slots = [Slot(index, device, name, f"/{index}", 48) for index, (device, name) in enumerate(places)]
    return Plan({}, [Model(name, "/", "directory", 1024, 50257) for name in names], slots)


def test_each_pair_of_gpu_and_model_is_measured_once(tmp_path: Path) -> None:
    slots = gpu_places(plan_of("cuda:0", "cuda:1"), Settings(run_dir=tmp_path))
    assert [(slot.index, slot.device, slot.model) for slot in slots] == [
        (0, "cuda:0", "small"), (2, "cuda:0", "medium"), (4, "cuda:1", "small"), (6, "cuda:1", "medium"),
    ]  # fmt: skip


def test_a_running_server_is_refused(tmp_path: Path) -> None:
    settings = Settings(run_dir=tmp_path)
    with lock_run_directory(settings, "workers"), pytest.raises(StartError, match=f"process {os.getpid()}.*stop it"):
        gpu_places(plan_of("cuda:0"), settings)


def tercet(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy", *arguments],
        cwd=ROOT, env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COLUMNS": "200", **environ},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = tercet("tune", "--kernels", TERCET_RUN_DIR=str(tmp_path / "run"), TERCET_DEVICES="cpu")
    assert (done.returncode, done.stdout) == (1, "")
    assert "tercet tune --kernels needs a GPU, and the plan has none" in done.stderr


class StepsHere(StepTimer):
    """`StepTimer` in this process."""

    def __enter__(self) -> StepsHere:
        return self

    def __exit__(self, *_: object) -> None: ...

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)


def test_rehearsal_of_the_measurement(tmp_path: Path) -> None:
    """On the stand-in: graphs are captured and replayed, and what they take is stored. The times mean nothing."""
    directory = str(resolve("embedded").directory)
    with fake_cuda(name="NVIDIA Stand-in") as fake:
        measurement = measure(lambda: StepsHere(directory, "", "fp32", 2), [1, 2], 1, 1, "a rehearsal", set())
        assert measurement is not None
        store_choice(KernelStore(tmp_path), measurement)
    assert fake.num_captures >= 2
    # There is no CUDA driver that could launch the kernels.
    assert measurement.rejected == {"triton": CHECK_FAILED, "fused": CHECK_FAILED}
    stored = KernelStore(tmp_path).read(measurement.key)
    assert stored is not None
    assert (stored.status, stored.reason) == ("torch", CHECK_FAILED)
    assert set(stored.step_us["torch"]) == {1, 2}
    assert min(stored.step_us["torch"].values()) > 0
    with fake_cuda(name="NVIDIA Stand-in"):  # a worker finds it
        config = read_config(Path(directory))
        choice = choose_kernels(config, torch.float32, 48, torch.device("cuda"), KernelStore(tmp_path))
    assert choice == KernelChoice("torch", CHECK_FAILED)


@pytest.mark.parametrize("capability", [(7, 0), (10, 0)])
def test_a_gpu_that_takes_the_plain_kernels_is_only_timed(capability: tuple[int, int]) -> None:
    directory = str(resolve("embedded").directory)
    with fake_cuda(capability=capability):
        measurement = measure(lambda: StepsHere(directory, "", "fp32", 1), [1], 1, 1, "a rehearsal", set())
    assert measurement is not None
    assert f"this GPU has {capability[0]}.{capability[1]}" in choose(measurement).reason


def test_rehearsal_of_the_command(tmp_path: Path) -> None:
    """On the stand-in: a process of its own on the device, the table, and what is said."""
    done = tercet(
        "tune", "--kernels", "--rows=1", "--quick", TERCET_RUN_DIR=str(tmp_path / "run"), CUDA_VISIBLE_DEVICES="0",
        TERCET_CACHE_DIR=str(tmp_path / "cache"), TERCET_MODELS="embedded*2", TERCET_DEVICES="cuda:0",
        TERCET_DTYPE="fp32", **process_environment(name="NVIDIA Stand-in"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "embedded on cuda:0: NVIDIA Stand-in, fp32" in done.stdout
    assert "µs (1.00 ×)" in done.stdout
    assert "nothing is stored" in done.stdout
    assert not (tmp_path / "cache" / "kernels.json").exists()
