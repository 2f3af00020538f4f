"""Pods without a cluster: the processes of a rendered manifest, each in a network namespace of its own.

A `Pod` runs its container's command with its environment, user and files. A thread does what the kubelet does for it:
probes, preStop, SIGTERM, SIGKILL at the end of the grace. `Service` has the addresses of the ready pods, as the
controllers of Kubernetes write them. All of this stands for a cluster, which cannot be had here.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.kubernetes.rendered import environment, port_number
from tests.deploy.test_systemd import open_python
from tests.e2e.harness import ROOT

Json = dict[str, Any]

USER = 10001
NETWORK = "10.213.7"
_CLONE_NEWNET = 0x40000000  # <sched.h>
_libc = ctypes.CDLL(None, use_errno=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


class Node:
    """A namespace with a bridge, to which the pods' namespaces are connected. Its threads can reach all pods."""

    def __init__(self, prefix: str) -> None:
        self.name = f"{prefix}-node"
        self._namespaces: list[str] = []
        self._prefix = prefix

    def open(self) -> None:
        self._add(self.name)
        self._ip(self.name, "link", "add", "bridge0", "type", "bridge")
        self._ip(self.name, "addr", "add", f"{NETWORK}.1/24", "dev", "bridge0")
        self._ip(self.name, "link", "set", "bridge0", "up")

    def add_pod(self, number: int) -> tuple[str, str]:
        """A pod's namespace, and its address."""
        name, address = f"{self._prefix}-{number}", f"{NETWORK}.{number + 10}"
        self._add(name)
        run(
            "ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"v{number}", "netns", self.name
        )
        self._ip(self.name, "link", "set", f"v{number}", "master", "bridge0", "up")
        self._ip(name, "addr", "add", f"{address}/24", "dev", "eth0")
        self._ip(name, "link", "set", "eth0", "up")
        return name, address

    def close(self) -> None:
        """Remove the namespaces, and with them their interfaces."""
        for name in reversed(self._namespaces):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def enter(self) -> None:
        """Move the calling thread to the node's network; no other thread is moved."""
        with open(f"/run/netns/{self.name}", "rb") as namespace:
            if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def _add(self, name: str) -> None:
        hosts = Path(f"/etc/netns/{name}/hosts")
        hosts.parent.mkdir(parents=True)
        hosts.write_text("127.0.0.1 localhost\n")
        self._namespaces.append(name)
        run("ip", "netns", "add", name)
        self._ip(name, "link", "set", "lo", "up")

    @staticmethod
    def _ip(name: str, *arguments: str) -> None:
        run("ip", "-n", name, *arguments)


class Pod:
    """One pod of a Deployment, from its start to its end.

    Attributes:
        is_ready: whether its readiness probe succeeds and it is not terminating.
        readiness: each status of the readiness probe, repetitions left out; 0: no connection.
        exit_code: exit code of its process, once it has ended.
        num_restarts: kills by the startup or liveness probe, which restart nothing here.
    """

    def __init__(
        self,
        node: Node,
        number: int,
        overlay: str,
        template: Json,
        container: Json,
        base: Path,
        files: Mapping[str, bytes],
        on_change: Callable[[], None],
    ) -> None:
        """
        Args:
            files: contents of the mounted files by their paths in the container.
            on_change: called, in the pod's thread, when `is_ready` has changed.
        """
        self.namespace, self.address = node.add_pod(number)
        self.is_ready = self.is_terminating = False
        self.readiness: list[int] = []
        self.exit_code: int | None = None
        self.num_restarts = 0
        self.stop_s = 0.0
        self._node, self._template, self._container, self._on_change = node, template, container, on_change
        self._root = base / self.namespace
        self._environ = self._prepare(overlay, files)
        self._delete = threading.Event()
        self.thread = threading.Thread(target=self._live, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def delete(self) -> None:
        """As `kubectl delete pod` without waiting."""
        self.is_terminating = True
        self._set_ready(False)
        self._delete.set()

    def log(self) -> str:
        return (self._root / "log").read_text(errors="replace")

    def _prepare(self, overlay: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """Write the mounted files; returns the environment, with the paths of the mounts in this pod's folder."""
        mounts = [mount["mountPath"] for mount in self._container["volumeMounts"]]
        writable = [mount["mountPath"] for mount in self._container["volumeMounts"] if not mount.get("readOnly")]
        for path in mounts:
            (self._root / path.lstrip("/")).mkdir(parents=True)
        for path in writable:
            shutil.chown(self._root / path.lstrip("/"), USER, USER)
        for path, content in files.items():
            if str(Path(path).parent) in mounts:  # as a Secret: of root, readable by the pod's group
                file = self._root / path.lstrip("/")
                file.write_bytes(content)
                os.chown(file, 0, USER)
                file.chmod(0o440)
        (self._root / "python").mkdir()
        (self._root / "log").touch()
        environ = environment(overlay, self._template, self._container)
        pattern = re.compile("|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True)))
        moved = {
            name: pattern.sub(lambda match: str(self._root / match[0].lstrip("/")), value)
            for name, value in environ.items()
            if name != "PATH"
        }
        return {"PATH": os.environ["PATH"], **moved, "TMPDIR": str(self._root / "tmp")}

    def _command(self) -> list[str]:
        """The image's entry point with the container's arguments, on a read-only file system, without capabilities."""
        writable = [self._root / path for path in ("tmp", "var/lib/tercet")]
        mounts = [open_python(self._root / "python"), *(f"mount --bind {path} {path}" for path in writable)]
        mounts += [f"mount --bind {ROOT} {ROOT}", f"mount -o remount,bind,ro {ROOT}", "mount -o remount,bind,ro /"]
        drop = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]
        drop += ["--bounding-set=-all", "--inh-caps=-all"]
        entry = [*drop, sys.executable, "-m", "deploy", *self._container["args"]]
        program = f'{" && ".join(mounts)} && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", program, "sh", *entry]

    def _live(self) -> None:
        self._node.enter()
        with (self._root / "log").open("wb") as log:
            process = subprocess.Popen(
                self._command(),
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        with httpx.Client(verify=False, trust_env=False) as client:
            self._probe_until_deleted(client, process)
            started_at = time.monotonic()
            grace_s = self._template["spec"]["terminationGracePeriodSeconds"]
            time.sleep(self._container["lifecycle"]["preStop"]["sleep"]["seconds"])
            process.send_signal(signal.SIGTERM)
            try:
                self.exit_code = process.wait(max(0.0, started_at + grace_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                self.exit_code = process.wait()
            self.stop_s = time.monotonic() - started_at

    def _probe_until_deleted(self, client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
        kinds = {name: self._container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
        failures = dict.fromkeys(kinds, 0)
        next_at = dict.fromkeys(kinds, time.monotonic())
        is_started = False
        while not self._delete.wait(0.05) and process.poll() is None:
            for name, probe in kinds.items():
                if (name == "startup") is is_started or time.monotonic() < next_at[name]:
                    continue
                next_at[name] = time.monotonic() + probe["periodSeconds"]
                status = self._probe(client, probe)
                failures[name] = 0 if 200 <= status < 400 else failures[name] + 1
                if name == "readiness" or (name == "startup" and probe["httpGet"]["path"].endswith("ready")):
                    self.readiness += [status] if self.readiness[-1:] != [status] else []
                if name == "startup":
                    is_started = failures[name] == 0
                has_failed = failures[name] >= probe["failureThreshold"]
                if name == "readiness" and (has_failed or not failures[name]):
                    self._set_ready(not has_failed)
                elif has_failed:
                    self.num_restarts += 1

    def _probe(self, client: httpx.Client, probe: Json) -> int:
        request = probe["httpGet"]
        scheme = request.get("scheme", "HTTP").lower()
        url = f"{scheme}://{self.address}:{port_number(self._container, request['port'])}{request['path']}"
        try:
            return client.get(url, timeout=probe["timeoutSeconds"], headers={"Connection": "close"}).status_code
        except httpx.TransportError:
            return 0

    def _set_ready(self, is_ready: bool) -> None:
        is_ready = is_ready and not self.is_terminating
        if is_ready is not self.is_ready:
            self.is_ready = is_ready
            self._on_change()


class Cluster:
    """The pods of an overlay, and the names of its Services."""

    def __init__(self, node: Node, overlay: str, base: Path, files: Mapping[str, bytes]) -> None:
        self.node, self._overlay, self._base, self._files = node, overlay, base, files
        self._lock = threading.Lock()
        self.pods: dict[str, list[Pod]] = {"tercet-gateway": [], "tercet-workers": []}

    def start(self, name: str, template: Json) -> Pod:
        """Another pod of a Deployment."""
        number = sum(map(len, self.pods.values()))
        [container] = template["spec"]["containers"]
        pod = Pod(self.node, number, self._overlay, template, container, self._base, self._files, self._write_hosts)
        self.pods[name].append(pod)
        self._write_hosts()
        pod.start()
        return pod

    def addresses(self, name: str) -> list[str]:
        """Return the addresses of the ready pods of a Deployment."""
        return [pod.address for pod in self.pods[name] if pod.is_ready]

    def _write_hosts(self) -> None:
        """The headless Service's name in the gateways' namespaces: in place, because the file is mounted."""
        with self._lock:
            lines = [f"{address} tercet-workers.tercet.svc\n" for address in self.addresses("tercet-workers")]
            for pod in self.pods["tercet-gateway"]:
                Path(f"/etc/netns/{pod.namespace}/hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def stop(self) -> None:
        pods = [pod for group in self.pods.values() for pod in group]
        for pod in pods:
            pod.delete()
        for pod in pods:
            pod.thread.join(90)


@contextmanager
def cluster(overlay: str, base: Path, files: Mapping[str, bytes]) -> Iterator[Cluster]:
    """An empty cluster; its pods and namespaces end with it."""
    node = Node(f"tk{os.getpid()}")
    try:
        node.open()
        made = Cluster(node, overlay, base, files)
        try:
            yield made
        finally:
            made.stop()
    finally:
        with suppress(OSError):
            node.close()
