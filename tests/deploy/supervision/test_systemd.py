"""The units by systemd's own tools, and Tercet under its unit's restrictions, without a running systemd.

What only a running systemd could show is not shown: the effect of the other `Protect…=` and `Restrict…=` lines, and
`IPAddressDeny=`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.needs import need
from tests.e2e.harness import ROOT, Tercet, until
from tests.programs import run_program

UNITS = ROOT / "deploy/supervision/systemd"
DROP_INS = (
    Path("none"),
    *sorted((UNITS / "tercet.service.d").glob("*.conf")),
    ROOT / "deploy/cloud/aws/tercet.service.d/aws.conf",
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
            # A drop-in could not take the dependency away, and then systemd would start and pass the socket.
            directives = [line for line in text.splitlines() if not line.startswith("#")]
            assert "tercet.socket" not in "".join(directives)
    command = ["systemd-analyze", "verify", "--man=no", str(socket_unit), str(service)]
    done = run_program(command)
    assert (done.returncode, done.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(service)]
    done = run_program(command, check=True)
    exposure = re.search(r"Overall exposure level for tercet.service: ([0-9.]+)", done.stdout)
    assert exposure is not None
    assert float(exposure[1]) <= MAX_EXPOSURE, done.stdout


def test_systemd_would_make_the_user(tmp_path: Path) -> None:
    need("systemd:systemd-sysusers")
    (tmp_path / "etc").mkdir()
    command = ["systemd-sysusers", f"--root={tmp_path}", "--dry-run", str(UNITS / "tercet.sysusers.conf")]
    done = run_program(command, check=True)
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
    lines = run_program(command, check=True).stdout.splitlines()[1:]
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


class Unit(Tercet):
    """Tercet as the unit starts it: its command, environment, user, file system and system calls.

    /run/tercet and /var/lib/tercet are directories of `base`.
    """

    def __init__(self, base: Path, **settings: str) -> None:
        """
        Args:
            settings: lines of /etc/tercet/environment, without `TERCET_`.
        """
        super().__init__(base)
        self.base = base
        for name in ("run", "state", "python"):
            (base / name).mkdir()
            shutil.chown(base / name, USER, USER)
        text = (UNITS / "tercet.service").read_text()
        lines = [line.partition("=") for line in text.splitlines() if not line.startswith("#")]
        values = [(name, value) for name, _, value in lines]
        moved = {"/run/tercet": f"{base}/run", "/var/lib/tercet": f"{base}/state"}
        environ = dict(word.split("=", 1) for name, value in values if name == "Environment" for word in value.split())
        for old, new in moved.items():
            environ = {name: value.replace(old, new) for name, value in environ.items()}
        environ |= {"TERCET_BIND": f"127.0.0.1:{self.port}"}  # as in the socket unit
        environ |= {f"TERCET_{name.upper()}": value for name, value in settings.items()}
        self.environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", **environ}
        self.run_dir = base / "run/instance"
        [exec_start] = [value for name, value in values if name == "ExecStart"]
        program, *self.arguments = exec_start.split()
        assert program == "/opt/tercet/.venv/bin/tercet"

    def start_unit(self, listener: socket.socket) -> None:
        """Start it; `listener` is the passed socket."""
        python, writable = self.base / "python", (self.base / "run", self.base / "state")
        mounts = [
            open_python(python),
            f"mount --bind {ROOT} {ROOT} && mount -o remount,bind,ro {ROOT}",
            *(f"mount --bind {path} {path}" for path in writable),
            "mount -o remount,bind,ro /",
        ]
        try_to_write = f"! touch {ROOT}/deploy/written 2>/dev/null"
        drop = f"setpriv --reuid={USER} --regid={USER} --clear-groups --no-new-privs --bounding-set=-all"
        descriptor = listener.fileno()
        run = [sys.executable, f"{ROOT}/tests/deploy/sandbox.py", str(descriptor), ",".join(allowed_system_calls())]
        command = shlex.join([*drop.split(), *run, sys.executable, "-m", "deploy", *self.arguments])
        program = " && ".join([*mounts, try_to_write, f"umask 0077 && exec {command}"])
        self.start("unshare", "--mount", "sh", "-c", program, pass_fds=[descriptor])

    def assert_is_restricted(self) -> None:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        assert re.search(rf"^Uid:\t{USER}\t{USER}\t", status, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE)

    def stop_unit(self) -> None:
        assert self.stop() == 0, self.log()
        assert not self.run_dir.exists()


def test_it_serves_without_root_on_a_read_only_file_system_within_the_system_call_filter(base: Path) -> None:
    """The unit's user, file system, privileges, system calls and passed socket."""
    need("systemd:systemd-analyze", "mount", "util-linux:setpriv", root=True)
    tercet = Unit(base, models="embedded")
    with socket.create_server(("127.0.0.1", tercet.port)) as listener:
        tercet.start_unit(listener)
        try:
            tercet.wait_until_warm()
            assert len(tercet.ask()["sentences"]) == 3
            until(lambda: tercet.num_starts, 10, "announced")
            tercet.assert_is_restricted()
        finally:
            tercet.stop_unit()
    # The kernels are those of the set-up.
    assert "ompiled kernels cannot be" not in tercet.log()
    assert not list((base / "state").glob(".cache/tercet/kernels-*"))
