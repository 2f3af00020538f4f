"""Machines for tests: network namespaces on one bridge, each with an address, and names that can change.

Needs root. Everything is removed at the end: the processes in the namespaces, the namespaces, their files of names.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Network:
    """Namespaces by name, on a bridge in a namespace of its own.

    Attributes:
        addresses: addresses by machine.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self.addresses = dict(addresses)
        self._prefix = f"tct{os.getpid() % 100_000}-"

    def namespace(self, machine: str) -> str:
        return self._prefix + machine

    def create(self) -> None:
        switch = self.namespace("switch")
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for machine, address in self.addresses.items():
            name = self.namespace(machine)
            ip("netns", "add", name)
            ip("-n", switch, "link", "add", machine, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", switch, "link", "set", machine, "master", "br0", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
            self.set_names(machine, {})

    def remove(self) -> None:
        for machine in [*self.addresses, "switch"]:
            name = self.namespace(machine)
            with suppress(subprocess.CalledProcessError):
                for pid in ip("netns", "pids", name).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                ip("netns", "delete", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def set_names(self, machine: str, names: Mapping[str, list[str]]) -> None:
        """What names mean on a machine from now on, besides localhost. `ip netns exec` mounts the file over /etc/hosts,
        so it is written in place."""
        path = Path(f"/etc/netns/{self.namespace(machine)}/hosts")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{address} {name}\n" for name, addresses in names.items() for address in addresses]
        path.write_text("127.0.0.1 localhost\n" + "".join(lines))

    def command(self, machine: str, *command: str) -> list[str]:
        """The command line that runs a command on a machine."""
        return ["ip", "netns", "exec", self.namespace(machine), *command]

    def enter(self, machine: str) -> None:
        """Move this thread to a machine, and the threads that it starts from now on. There is no way back."""
        with Path(f"/run/netns/{self.namespace(machine)}").open() as file:
            if _libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def call(self, machine: str, function: Callable[[], T]) -> T:
        """The result of a function that runs on a machine, in a thread of its own."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self.enter(machine)
                results.append(function())
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


@contextmanager
def network(addresses: Mapping[str, str]) -> Iterator[Network]:
    made = Network(addresses)
    try:
        made.create()
        yield made
    finally:
        made.remove()
