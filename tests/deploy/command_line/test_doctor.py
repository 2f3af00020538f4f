"""`tercet doctor`: what it reads from /proc and /sys, what it advises, and its exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deploy.command_line import doctor
from deploy.command_line.doctor import Finding, examine
from tests.deploy.command_line.test_cli import tercet
from tests.programs import gpu_row, write_program
from workers.engine.cpu_kernels import COMPILED

CPUINFO = "model name : Some CPU\nflags : fpu avx2 {flags}\n\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine with nothing to improve. It hides this machine's `nvidia-smi`."""
    monkeypatch.setenv("PATH", str(tmp_path))
    files = {
        "proc/cpuinfo": CPUINFO.format(flags="fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni amx_int8"),
        "proc/loadavg": "0.00 0.01 0.05 1/100 1",
        "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\n",
        "proc/sys/net/core/somaxconn": "4096",
        "sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "0",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
        "sys/fs/cgroup/cpu.max": "max 100000",
        "sys/fs/cgroup/memory.current": "0",
        "sys/fs/cgroup/memory.max": "max",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x030000",
    }
    for name, text in files.items():
        write(tmp_path, name, text)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def advice(root: Path, **environ: str) -> list[Finding]:
    """What it would change, but for the machine's own limits, disk and caches."""
    report = examine({"CUDA_VISIBLE_DEVICES": "", **environ}, root)
    topics = {"cpu", "load", "memory", "gpu"}
    return [found for found in report.findings if found.severity != "fact" and found.topic in topics]


def test_a_machine_with_nothing_to_improve_gets_no_advice(machine: Path) -> None:
    assert advice(machine) == []


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de", "nvidia-driver"),
        ("proc/cpuinfo", CPUINFO.format(flags="fma f16c"), "/proc/cpuinfo"),
        ("proc/loadavg", "64.00 1 1 1/100 1", "ps -eo pcpu"),
        ("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 1048576 kB", "TERCET_MODELS=embedded"),
        ("sys/fs/cgroup/memory.max", "1073741824", "TERCET_MODELS=embedded"),
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave", "cpupower"),
        ("sys/fs/cgroup/cpu.max", "50000 100000", "TERCET_CPU_THREADS=1"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", "echo madvise"),
    ],
)
def test_each_thing_to_improve_comes_with_a_command(machine: Path, file: str, text: str, words: str) -> None:
    write(machine, file, text)
    (found,) = advice(machine)
    assert words in found.command
    assert (found.severity, bool(found.why)) == ("advice", True)


def test_a_gpu_that_a_start_would_refuse_is_a_problem_unless_it_is_not_used(machine: Path) -> None:
    """A device node without a working `nvidia-smi`."""
    write(machine, "dev/nvidia0", "")
    assert not examine({}, machine).can_run
    assert examine({"TERCET_DEVICES": "cpu"}, machine).can_run


@pytest.mark.parametrize("has_mps", [False, True])
def test_mps_is_a_fact(machine: Path, monkeypatch: pytest.MonkeyPatch, has_mps: bool) -> None:
    """`tercet tune` advises it where several workers of a GPU are best."""
    write_program(machine / "nvidia-smi", f"echo '{gpu_row('NVIDIA H100')}'")
    monkeypatch.setattr("deploy.tuning.gpus.installed_cuda", lambda: (True, "13.0"))
    if has_mps:
        write(machine, "tmp/nvidia-mps/control", "")
    facts = [found.fact for found in examine({}, machine).findings if found.severity == "fact"]
    assert f"MPS is {'' if has_mps else 'not '}running" in facts


def test_the_instruction_set_in_use_is_named_with_what_a_better_one_would_bring(machine: Path) -> None:
    def kernels() -> Finding:
        return next(found for found in examine({}, machine).findings if "int8 kernels" in found.fact)

    assert kernels() == Finding("cpu", "int8 kernels for AVX-512 VNNI and AMX")
    write(machine, "proc/cpuinfo", CPUINFO.format(flags="fma f16c"))
    assert (kernels().severity, kernels().fact) == ("advice", "int8 kernels for AVX2")
    assert "AVX-512 VNNI" in kernels().why


def test_kernels_that_are_not_compiled_are_a_problem(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(COMPILED.iterdir())
    monkeypatch.setattr(doctor, "COMPILED", tmp_path)
    (problem,) = (found for found in examine({}, machine).findings if found.severity == "problem")
    assert problem.fact == "int8 kernels for AVX-512 VNNI and AMX: not compiled"
    assert problem.command == "rm -f .venv/serve.stamp && make setup-serve"


def test_this_machine_can_run_it() -> None:
    done = tercet("doctor", "--json", PATH=os.environ["PATH"])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["can_run"] is True
    assert {found["topic"] for found in report["findings"]} >= {"software", "cpu", "memory", "limits", "gpu", "caches"}
    assert all(found["command"] for found in report["findings"] if found["severity"] != "fact")


def test_settings_that_a_start_would_refuse_are_a_problem() -> None:
    done = tercet("doctor", TERCET_QUEUE="many")
    assert done.returncode == 1
    assert "Tercet cannot run here:" in done.stdout
    assert "TERCET_QUEUE" in done.stdout
