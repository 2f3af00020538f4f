"""`deploy/systemd/` by systemd's own tools, and Tercet under its unit's restrictions, without a running systemd.

What only a running systemd could show is not shown: the effect of the other `Protect…=` and `Restrict…=` lines, and
`IPAddressDeny=`.
"""

from __future__ import annotations

import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.needs import need
from tests.e2e.harness import ROOT, Tercet, until

UNITS = ROOT / "deploy" / "systemd"
DROP_INS = (
    Path("none"),
    *sorted((UNITS / "tercet.service.d").glob("*.conf")),
    ROOT / "deploy" / "aws" / "tercet.service.d" / "aws.conf",
)
USER = 65534  # without privileges
MAX_EXPOSURE = 1.5  # S8 in docs/RELIABILITY.md; on systemd's scale of 0 to 10

pytestmark = pytest.mark.deploy


@pytest.mark.parametrize("drop_in", DROP_INS, ids=lambda path: path.stem)
def test_systemd_finds_no_fault_in_the_units_and_little_exposure(tmp_path: Path, drop_in: Path) -> None:
    """The paths of an installation become this checkout's: systemd checks that they exist."""
    need("systemd:systemd-analyze")
    service, socket_unit = tmp_path / "tercet.service", tmp_path / "tercet.socket"
    (tmp_path / "tercet.service.d").mkdir()
    for source, target in (
        (UNITS / service.name, service),
        (UNITS / socket_unit.name, socket_unit),
        (drop_in, tmp_path / "tercet.service.d" / drop_in.name),
    ):
        if source.is_file():
            text = source.read_text().replace("/opt/tercet/.venv/bin/", f"{sys.prefix}/bin/")
            target.write_text(text.replace("/opt/tercet", str(ROOT)))
    command = ["systemd-analyze", "verify", "--man=no", str(socket_unit), str(service)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(service)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    exposure = re.search(r"Overall exposure level for tercet.service: ([0-9.]+)", done.stdout)
    assert exposure is not None
    assert float(exposure[1]) <= MAX_EXPOSURE, done.stdout


def test_systemd_would_make_the_user(tmp_path: Path) -> None:
    need("systemd:systemd-sysusers")
    (tmp_path / "etc").mkdir()
    command = ["systemd-sysusers", f"--root={tmp_path}", "--dry-run", str(UNITS / "tercet.sysusers.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Creating user 'tercet'" in done.stdout + done.stderr


def allowed_system_calls() -> list[str]:
    """The system calls that the unit's filter allows, by its lines in their order."""
    allowed: set[str] = set()
    for line in (UNITS / "tercet.service").read_text().splitlines():
        name, _, value = line.partition("=")
        if name == "SystemCallFilter":
            members = set().union(*(system_calls(entry) for entry in value.lstrip("~").split()))
            allowed = allowed - members if value.startswith("~") else allowed | members
    return sorted(allowed)


def system_calls(entry: str) -> set[str]:
    """The members of a group such as `@chown`, which may contain groups."""
    if not entry.startswith("@"):
        return {entry}
    command = ["systemd-analyze", "syscall-filter", "--no-pager", entry]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    members = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    return set().union(*map(system_calls, members))


def open_python(mountpoint: Path) -> str:
    """A shell command by which every user may run this Python also in a home directory, as pyenv has it."""
    prefix = Path(sys.base_prefix)
    closed = [directory for directory in prefix.parents if not directory.stat().st_mode & stat.S_IXOTH]
    if not closed:
        return "true"
    return (
        f"mount --bind {prefix} {mountpoint} && mount -t tmpfs -o mode=755 tmpfs {closed[-1]}"
        f" && mkdir -p {prefix} && mount --move {mountpoint} {prefix}"
    )


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that every user may enter; pytest's own is for this user only."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_it_serves_without_root_on_a_read_only_file_system_within_the_system_call_filter(base: Path) -> None:
    """The unit's user, file system, privileges, system calls and passed socket."""
    need("systemd:systemd-analyze", "mount", "util-linux:setpriv", root=True)
    writable = base / "writable"
    for name in ("run", "home"):
        (writable / name).mkdir(parents=True)
    for path in (writable, *writable.iterdir()):
        shutil.chown(path, USER, USER)
    (base / "python").mkdir()
    tercet = Tercet(writable, run_dir=str(writable / "run/instance"))
    tercet.environ["HOME"] = str(writable / "home")
    tercet.log_path = base / "log"
    with socket.create_server(("127.0.0.1", tercet.port)) as listener:
        mounts = (
            f"{open_python(base / 'python')} && mount --bind {ROOT} {ROOT} && mount -o remount,bind,ro {ROOT}"
            f" && mount --bind {writable} {writable} && mount -o remount,bind,ro /"
        )
        try_to_write = f"! touch {ROOT}/deploy/written 2>/dev/null"
        drop = f"setpriv --reuid={USER} --regid={USER} --clear-groups --no-new-privs --bounding-set=-all"
        number = listener.fileno()
        run = f"{sys.executable} {ROOT}/tests/deploy/sandbox.py {number} {','.join(allowed_system_calls())}"
        program = f"{mounts} && {try_to_write} && exec {drop} {run} {sys.executable} -m deploy serve"
        tercet.start("unshare", "--mount", "sh", "-c", program, pass_fds=[number])
        try:
            tercet.wait_until_warm()
            assert len(tercet.ask()["sentences"]) == 3
            until(lambda: tercet.num_starts, 10, "announced")
            status = Path(f"/proc/{tercet.process.pid}/status").read_text()
            assert re.search(rf"^Uid:\t{USER}\t{USER}\t", status, re.MULTILINE)
            assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
            assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE)
        finally:
            assert tercet.stop() == 0, tercet.log()
    assert not (writable / "run/instance").exists()
    # The kernels are those of the set-up.
    assert "ompiled kernels cannot be" not in tercet.log()
    assert not list((writable / "home").glob(".cache/tercet/kernels-*"))
