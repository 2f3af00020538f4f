"""`tercet doctor`: what this machine has, what would make Tercet faster on it, and what keeps Tercet from running.

Reads /proc, /sys, the installed packages and `nvidia-smi`; changes nothing, contacts no hub, and imports no torch. It
names what can be known without a measurement: `tercet tune` measures.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from deploy.terminal import json_lines, make_console
from deploy.tuning.gpus import DEVICE_NODES, check_gpus, has_mps, list_gpus, query_gpus
from deploy.tuning.load.run import NOT_INSTALLED, versions
from deploy.tuning.planning import count_gpus
from shared import cpu_features
from shared.errors import StartError
from shared.extras import repair_command
from shared.free_memory import free_bytes
from shared.gpu_builds import installed_cuda
from shared.masters.startup import BACKLOG
from shared.settings import Settings
from workers.engine.cpu_kernels import COMPILED, compiled_path

GIB = 1 << 30
# Below these, a server of the embedded checkpoint may not start, or a checkpoint of GPT-2 small not be downloaded.
MIN_MEMORY_BYTES = 2 * GIB
MIN_DISK_BYTES = 2 * GIB
# Limit of open files; the gateway derives from it how many connections may be open (gateway/server/bounds.py).
MIN_DESCRIPTORS = 4096
PACKAGES = ("torch", "tokenizers", "gunicorn", "falcon")
# What a better instruction set would bring, by the one in use; no text depends on it.
_BETTER = {
    "avx_vnni": "With AVX-512 VNNI a prompt takes two thirds of the time; the other tokens take as long.",
    "avx2": "With AVX-VNNI or AVX-512 VNNI prompts, and many requests at once, take less time; other tokens take as "
    "long where memory limits them. In a virtual machine the host may hide the instructions (QEMU: -cpu host).",
    "scalar": "With AVX2, or dot products on ARM, everything is ten times as fast. In a virtual machine the host may "
    "hide the instructions (QEMU: -cpu host).",
}
_NVIDIA = "0x10de"  # PCI vendor; classes 0x03… are display controllers

Severity = Literal["fact", "advice", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """A fact; if it can be improved, what that would bring and the command. With a problem Tercet cannot run."""

    topic: str
    fact: str
    severity: Severity = "fact"
    why: str = ""
    command: str = ""


class Report(msgspec.Struct, frozen=True):
    """All findings, and whether Tercet can run here."""

    can_run: bool
    findings: list[Finding]


def examine(environ: Mapping[str, str], root: Path = Path("/")) -> Report:
    """All that is known of this machine.

    Args:
        root: directory under which /proc and /sys are read.
    """
    findings = list(_software())
    try:
        settings = Settings.load(environ)
    except StartError as error:
        findings.append(Finding("settings", str(error), "problem", "`tercet serve` refuses them.", "tercet settings"))
        settings = Settings()
    findings += [
        *_cpu(root),
        *_load(root),
        *_memory(root),
        *_limits(root),
        *_gpus(settings, environ, root),
        *_caches(settings),
    ]
    return Report(all(finding.severity != "problem" for finding in findings), findings)


def _software() -> Iterator[Finding]:
    yield Finding("software", f"Python {platform.python_version()}, {platform.platform()}")
    installed = versions()
    missing = [name for name in PACKAGES if installed[name] == NOT_INSTALLED]
    yield from (Finding("software", f"{name} {installed[name]}") for name in PACKAGES if name not in missing)
    if missing:
        fact = f"{', '.join(missing)}: {NOT_INSTALLED}"
        yield Finding("software", fact, "problem", "Tercet imports them.", repair_command())


def _cpu(root: Path) -> Iterator[Finding]:
    cpu = cpu_features.parse(_read(root / "proc/cpuinfo"))
    flags = cpu.kernel_flags
    cores = cpu_features.num_cores()
    siblings = _read(root / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    threads_per_core = len(siblings.replace("-", ",").split(",")) if siblings else 1
    yield Finding("cpu", f"{cpu.name}; {cores} logical cores, {threads_per_core} per physical core")
    used, *_ = cpu.instruction_sets
    fact = f"int8 kernels for {used.title}{' and AMX' if 'amx_int8' in flags and used.name == 'avx512_vnni' else ''}"
    if not compiled_path(used, COMPILED, sys.platform).exists():
        why = "A worker cannot load a model on the CPU."
        yield Finding("cpu", f"{fact}: not compiled", "problem", why, repair_command())
    else:
        command = "grep -m1 -E 'flags|Features' /proc/cpuinfo"
        yield _judged("cpu", fact, used.name in _BETTER, _BETTER.get(used.name, ""), command)
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and int(quota) < cores * int(period):
        allowed = int(quota) / int(period)
        fact = f"the control group may use {allowed:g} of {cores} cores"
        why = "Threads beyond the quota are stopped for the rest of each period."
        yield _judged("cpu", fact, True, why, f"export TERCET_CPU_THREADS={max(1, int(allowed))}")
    if governor := _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"):
        why = "A request is short, and the clock rises only during it."
        command = "cpupower frequency-set -g performance"
        yield _judged("cpu", f"frequency governor {governor}", governor != "performance", why, command)


def _load(root: Path) -> Iterator[Finding]:
    text = _read(root / "proc/loadavg")
    cores = cpu_features.num_cores()
    if not text:
        return
    load = float(text.split()[0])
    fact = f"{load:g} processes want to run on {cores} cores"
    why = "Other processes take time from every token."
    yield _judged("load", fact, load > cores / 2, why, "ps -eo pcpu,args --sort=-pcpu | head")


def _memory(root: Path) -> Iterator[Finding]:
    available, total = free_bytes(root), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fact = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    why = "A worker may be killed while it loads its model: serve the small checkpoint in small batches."
    command = "TERCET_MODELS=embedded TERCET_MAX_BATCH=12 tercet serve"
    yield _judged("memory", fact, available < MIN_MEMORY_BYTES, why, command)
    if pages := _read(root / "sys/kernel/mm/transparent_hugepage/enabled"):
        chosen = pages.partition("[")[2].partition("]")[0]
        why = "Workers ask for pages of 2 MiB for their weights, which a step reads from end to end."
        command = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield _judged("memory", f"transparent huge pages: {chosen}", chosen == "never", why, command)


def _limits(root: Path) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = hard == resource.RLIM_INFINITY
    fact = f"{'unlimited' if is_unlimited else hard} open files"
    why = "A connection is a descriptor: with few, idle clients are disconnected."
    is_low = not is_unlimited and hard < MIN_DESCRIPTORS
    yield _judged("limits", fact, is_low, why, "ulimit -Hn 16384 (systemd: LimitNOFILE=)")
    backlog = _read(root / "proc/sys/net/core/somaxconn")
    if backlog.isdigit():
        fact = f"{backlog} connections may wait to be accepted"
        why = f"Tercet asks for a backlog of {BACKLOG} connections, which wait in it while a gateway is replaced."
        yield _judged("limits", fact, int(backlog) < BACKLOG, why, f"sysctl -w net.core.somaxconn={BACKLOG}")


def _gpus(settings: Settings, environ: Mapping[str, str], root: Path) -> Iterator[Finding]:
    devices = settings.pool.devices
    serves_on_cpu = devices == ("cpu",) or settings.pool.compute == "cpu"
    try:
        gpus = list_gpus([tuple(str(root / pattern.lstrip("/")) for pattern in group) for group in DEVICE_NODES])
        num_visible = count_gpus(environ) if gpus else 0
        check_gpus(devices or [f"cuda:{index}" for index in range(num_visible)], settings.model.dtype, environ)
    except StartError as error:
        why = "`tercet serve` refuses to start."
        yield Finding("gpu", str(error), "advice" if serves_on_cpu else "problem", why, "nvidia-smi")
        return
    if not gpus:
        has_card = any(_is_nvidia_card(path) for path in (root / "sys/bus/pci/devices").glob("*"))
        fact = "an NVIDIA card without a driver" if has_card else "none"
        command = "apt-get install nvidia-driver (Debian: non-free), then restart the machine"
        yield _judged("gpu", fact, has_card, "Tercet computes on the CPU only.", command)
        return
    _, cuda = installed_cuda()
    for gpu in gpus:
        yield Finding("gpu", f"{gpu.index}: {gpu.name}, driver {gpu.driver}; torch is built for CUDA {cuda}")
    if ["Disabled"] in query_gpus("persistence_mode"):
        why = "The driver forgets the card whenever no process uses it, and the next start waits for it."
        yield Finding("gpu", "persistence mode is off", "advice", why, "nvidia-smi -pm 1")
    yield Finding("gpu", "MPS is running" if has_mps(environ, root) else "MPS is not running")


def _is_nvidia_card(device: Path) -> bool:
    return _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith("0x03")


def _caches(settings: Settings) -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE  # reads the environment when it is imported

    hub = Path(HF_HUB_CACHE)
    found = sorted(path.name.removeprefix("models--").replace("--", "/") for path in hub.glob("models--*"))
    yield Finding("caches", f"checkpoints in {hub}: {', '.join(found) or 'none'}")
    for use, place in (("checkpoints", hub), ("run directory", settings.run_path)):
        existing = next(path for path in (place, *place.parents) if os.path.exists(path))
        free = shutil.disk_usage(existing).free
        fact = f"{free / GIB:.1f} GiB free at {existing} ({use})"
        is_low = free < MIN_DISK_BYTES and use == "checkpoints"
        yield _judged("disk", fact, is_low, "A checkpoint of GPT-2 small takes 0.6 GB.", "export HF_HOME=/path")


def _judged(topic: str, fact: str, is_advised: bool, why: str, command: str) -> Finding:
    """A fact, with the advice only where it can be improved."""
    return Finding(topic, fact, "advice", why, command) if is_advised else Finding(topic, fact)


def _read(path: Path) -> str:
    """The text of a file without the last newline; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what this machine has, what would make Tercet faster on it, and what keeps Tercet from running.

    The exit code is 0 unless Tercet cannot run here.
    """
    report = examine(os.environ)
    if as_json:
        sys.stdout.buffer.write(json_lines(report))
    else:
        _print(report)
    if not report.can_run:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    out = make_console()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    colors = {"fact": "", "advice": "yellow", "problem": "red"}
    last = ""
    for finding in report.findings:
        table.add_row(finding.topic if finding.topic != last else "", Text(finding.fact, colors[finding.severity]))
        last = finding.topic
    out.print(table)
    for heading, severity in (("Tercet cannot run here:", "problem"), ("What would make it faster:", "advice")):
        chosen = [finding for finding in report.findings if finding.severity == severity]
        if chosen:
            out.print(Text(f"\n{heading}", "bold"))
        for finding in chosen:
            out.print(Text.assemble("• ", (finding.fact, colors[severity]), f". {finding.why}"), soft_wrap=True)
            out.print(Text(f"    {finding.command}", "bold"), soft_wrap=True)
    if report.can_run:
        out.print(Text("\nTercet can run here.", "green"))
