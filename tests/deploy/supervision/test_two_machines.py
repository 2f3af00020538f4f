"""A machine of workers and one of a gateway, as docs/DISTRIBUTED.md starts them, in network namespaces.

The certificates and the key are made by the commands of the page. tests/chaos has what fails between the two.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.needs import need
from tests.documentation.blocks import blocks
from tests.e2e.harness import ROOT, until
from tests.programs import run_program

pytestmark = pytest.mark.deploy

NAME = "workers.example"
DOCUMENTED = {"workers": "10.77.0.21", "gateway": "10.77.0.22"}  # the machines of the documentation
WARM_S = 150.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def documented(heading: str) -> list[str]:
    """The blocks of a section of docs/DISTRIBUTED.md that the page says are tested here."""
    found = blocks(ROOT / "docs/DISTRIBUTED.md")
    return [each.text for each in found if each.section == heading and each.test.endswith(Path(__file__).name)]


def environ(directory: Path, **settings: str) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TERCET_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TERCET_DEVICES": "cpu",
        "TERCET_RUN_DIR": str(directory / "run"),
        "TERCET_JOBS": f"sqlite:{directory / 'jobs.sqlite3'}",
        "TERCET_DRAIN_S": "0.1",
        **{f"TERCET_{name.upper()}": value for name, value in settings.items()},
    }


@pytest.fixture
def machines() -> Iterator[dict[str, str]]:
    """Network namespaces by machine, with a cable between them. The gateway's machine knows the name of the other."""
    need("iproute2:ip", "openssl", "curl", root=True)
    names = {machine: f"tct{os.getpid()}-{machine}" for machine in DOCUMENTED}
    hosts = Path(f"/etc/netns/{names['gateway']}/hosts")  # `ip netns exec` mounts it over /etc/hosts
    hosts.parent.mkdir(parents=True)
    hosts.write_text(f"127.0.0.1 localhost\n{DOCUMENTED['workers']} {NAME}\n")
    try:
        for name in names.values():
            ip("netns", "add", name)
        ends = ("type", "veth", "peer", "name", "eth0", "netns")
        ip("-n", names["workers"], "link", "add", "eth0", *ends, names["gateway"])
        for machine, name in names.items():
            ip("-n", name, "address", "add", f"{DOCUMENTED[machine]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False)
        shutil.rmtree(hosts.parent)


def test_the_documented_commands(machines: dict[str, str], tmp_path: Path) -> None:
    """Two machines, started by the commands as they are written, with the embedded checkpoint."""
    make_files, workers, gateway, request = documented("Two machines")
    subprocess.run(["bash", "-euc", make_files], cwd=tmp_path, check=True, capture_output=True)
    running = []
    try:
        for machine, commands in (("workers", workers), ("gateway", gateway)):
            directory = tmp_path / machine
            directory.mkdir()
            script = commands.replace("small", "embedded")
            with (directory / "log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", machines[machine], "bash", "-euc", script],
                        cwd=tmp_path,
                        env=environ(directory),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        process_group=0,
                    )
                )

        def answer() -> str:
            command = ["ip", "netns", "exec", machines["gateway"], "bash", "-c", request]
            return run_program(command).stdout

        until(lambda: '"sentences":[{' in answer(), WARM_S, "an answer")
    finally:
        for process in reversed(running):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(40)
