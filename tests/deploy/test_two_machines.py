"""Two gateways and two machines of workers over TLS, in network namespaces, under load: what fails on one machine fails
no request, except those that were in flight in a gateway that is killed.

The certificates and the key are made by the commands of docs/DISTRIBUTED.md, and its two machines are started as it
says.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.http_client import Endpoint
from tests.chaos.proxy import ChaosProxy, Fault, always
from tests.deploy.namespaces import Network, network
from tests.deploy.needs import need
from tests.e2e.harness import ROOT, until

pytestmark = pytest.mark.deploy

NAME = "workers.example"
ADDRESSES = {"w1": "10.77.0.1", "w2": "10.77.0.2", "g1": "10.77.0.11", "g2": "10.77.0.12"}
DOCUMENTED = {"workers": "10.77.0.21", "gateway": "10.77.0.22"}  # the machines of the documentation
PORT = 8100
GATEWAYS = ("g1", "g2")
CLIENTS_PER_GATEWAY = 2
WARM_S = 150.0
REQUEST = {"context": "The old man looked at the sea and", "n_samples": 3, "length": 8}


def documented(heading: str) -> list[str]:
    """The shell blocks of a section of docs/DISTRIBUTED.md."""
    text = (ROOT / "docs/DISTRIBUTED.md").read_text()
    section = re.split(r"^## ", text.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", section, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in blocks]


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


class Machine:
    """`tercet serve` with one role on one machine of the network."""

    def __init__(self, net: Network, name: str, role: str, directory: Path, **settings: str) -> None:
        directory.mkdir(exist_ok=True)
        self._net, self.name, self._role = net, name, role
        self._environ = environ(directory, **settings)
        self.log_path = directory / "log"

    def start(self) -> None:
        command = self._net.command(self.name, sys.executable, "-m", "deploy", "serve", "--role", self._role)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(40) == 0, self.log_path.read_text()[-3000:]

    def worker(self) -> psutil.Process:
        """The process that serves: the only child of the only master."""
        (master,) = psutil.Process(self.process.pid).children()
        return master.children()[0]

    def kill(self) -> None:
        """As if the machine lost its power."""
        if self.process.poll() is None:
            serve = psutil.Process(self.process.pid)
            for process in [serve, *serve.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()

    def ready(self) -> dict[str, Any]:
        """The body of a gateway's `/health/ready`, {} if it does not answer."""

        def read() -> dict[str, Any]:
            connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=10)  # httpx would make a TLS context
            try:
                connection.request("GET", "/health/ready")
                page: dict[str, Any] = json.load(connection.getresponse())
            except OSError:
                return {}
            finally:
                connection.close()
            return page

        return self._net.call(self.name, read)

    def states(self) -> list[str]:
        return [slot["state"] for slot in self.ready().get("slots", [])]


@dataclass
class Load:
    """Clients of both gateways that send one request after another."""

    net: Network
    failures: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in GATEWAYS})
    num_answers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GATEWAYS, 0))
    _stopping: threading.Event = field(default_factory=threading.Event)

    def client(self, gateway: str) -> None:
        self.net.enter(gateway)
        with httpx.Client(base_url="http://127.0.0.1:8000", timeout=60, trust_env=False) as client:
            while not self._stopping.is_set():
                try:
                    response = client.post("/autocomplete", json=REQUEST)
                except httpx.TransportError as error:
                    self.failures[gateway].append(repr(error))
                    time.sleep(0.2)
                    continue
                if response.status_code != 200 or response.json()["partial"]:
                    self.failures[gateway].append(response.text)
                self.num_answers[gateway] += 1

    def stop(self) -> None:
        self._stopping.set()

    @property
    def num_failures(self) -> int:
        return sum(map(len, self.failures.values()))

    def until_more(self, count: int = 6) -> None:
        """Wait until each gateway has given some more answers."""
        start = dict(self.num_answers)
        until(lambda: all(self.num_answers[name] >= start[name] + count for name in GATEWAYS), 60, "answers")


@dataclass
class Cluster:
    net: Network
    directory: Path
    machines: dict[str, Machine]
    proxy: ChaosProxy

    def wait_until_warm(self, *states: str) -> None:
        """Wait until the gateways see these states of the slots; default: both warm."""
        expected = sorted(states or ("warm", "warm"))
        for name in GATEWAYS:
            self._wait_for(self.machines[name], expected)

    def _wait_for(self, machine: Machine, expected: list[str]) -> None:
        deadline = time.monotonic() + WARM_S
        while sorted(machine.states()) != expected:
            assert time.monotonic() < deadline, f"{machine.name} does not see {expected}: {machine.ready()}"
            time.sleep(0.2)

    @contextmanager
    def load(self) -> Iterator[Load]:
        """Load while the block runs. Prints what was answered, and what failed."""
        load = Load(self.net)
        threads = [
            threading.Thread(target=load.client, args=(name,)) for name in GATEWAYS for _ in range(CLIENTS_PER_GATEWAY)
        ]
        for thread in threads:
            thread.start()
        try:
            load.until_more()
            yield load
            load.until_more()
        finally:
            load.stop()
            for thread in threads:
                thread.join()
            sys.stdout.write(f"answers {load.num_answers}, failures {load.failures}\n")


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    need("iproute2:ip", "openssl", "curl", root=True)
    with network(ADDRESSES | DOCUMENTED) as made:
        yield made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key and the certificates, made as documented."""
    directory = tmp_path_factory.mktemp("files")
    make_files = documented("Two machines")[0]
    subprocess.run(["bash", "-euc", make_files], cwd=directory, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="module")
def cluster(net: Network, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """w1 is reached through the chaos proxy, w2 directly."""
    directory = tmp_path_factory.mktemp("c")
    for name in ("key", "workers.crt", "workers.key"):  # w1 has files of its own, which tests change
        (directory / name).write_bytes((files / name).read_bytes())
        (directory / name).chmod(0o600)
    own = {"w1": directory, "w2": files}
    machines = {}
    for name, bind in (("w1", f"127.0.0.1:{PORT}"), ("w2", f"0.0.0.0:{PORT}")):
        machines[name] = Machine(
            net, name, "workers", directory / name,
            models="embedded", pool_bind=bind, pool_key=str(own[name] / "key"),
            pool_tls_cert=str(own[name] / "workers.crt"), pool_tls_key=str(own[name] / "workers.key"),
        )  # fmt: skip
    for name in GATEWAYS:
        net.set_names(name, {NAME: [ADDRESSES["w1"], ADDRESSES["w2"]]})
        machines[name] = Machine(
            net, name, "gateway", directory / name,
            pool=f"embedded=https://{NAME}:{PORT}", pool_key=str(files / "key"), pool_ca=str(files / "ca.crt"),
        )  # fmt: skip

    def start_proxy() -> ChaosProxy:
        proxy = ChaosProxy(Endpoint(port=PORT), None, always(Fault()), (ADDRESSES["w1"], PORT))
        proxy.start()
        return proxy

    proxy = net.call("w1", start_proxy)
    for machine in machines.values():
        machine.start()
    made = Cluster(net, directory, machines, proxy)
    try:
        made.wait_until_warm()
        yield made
        for name in (*GATEWAYS, "w1", "w2"):
            machines[name].stop()
    except BaseException:
        for machine in machines.values():
            sys.stderr.write(f"{machine.name}: {machine.log_path.read_text()[-2000:]}\n")
            machine.kill()
        raise
    finally:
        proxy.stop()


def test_a_link_is_delayed(cluster: Cluster) -> None:
    with cluster.load() as load:
        cluster.proxy.set_schedule(always(Fault("delay", pause_s=0.1)))
        cluster.proxy.drop_connections()
        load.until_more(20)
        cluster.proxy.set_schedule(always(Fault()))
        cluster.proxy.drop_connections()
        cluster.wait_until_warm()
    assert load.num_failures == 0


@pytest.mark.parametrize("how", ["connections that answer nothing", "no link"])
def test_a_link_is_cut(cluster: Cluster, how: str) -> None:
    cut: Callable[[bool], None]

    def blackhole(is_cut: bool) -> None:
        cluster.proxy.set_schedule(always(Fault("blackhole") if is_cut else Fault()))
        cluster.proxy.drop_connections()

    def link(is_cut: bool) -> None:
        cluster.net.set_link("w1", "down" if is_cut else "up")

    cut = link if how == "no link" else blackhole
    with cluster.load() as load:
        cut(True)
        try:
            cluster.wait_until_warm("down", "warm")
            load.until_more()
        finally:
            cut(False)
        cluster.wait_until_warm()
    assert load.num_failures == 0


def test_the_documented_commands(net: Network, files: Path, tmp_path: Path) -> None:
    """Two machines, started by the commands as they are written, with the embedded checkpoint."""
    _, workers, gateway, request = documented("Two machines")
    net.set_names("gateway", {NAME: [DOCUMENTED["workers"]]})
    running = []
    try:
        for machine, commands in (("workers", workers), ("gateway", gateway)):
            directory = tmp_path / machine
            directory.mkdir()
            script = commands.replace("small", "embedded")
            with (directory / "log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        net.command(machine, "bash", "-euc", script), cwd=files, env=environ(directory),
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
                    )
                )  # fmt: skip

        def answer() -> str:
            command = net.command("gateway", "bash", "-c", request)
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout

        until(lambda: '"sentences":[{' in answer(), WARM_S, "an answer")
    finally:
        for process in reversed(running):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(40)
