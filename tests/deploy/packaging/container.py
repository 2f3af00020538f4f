"""Runs the image's files as deploy/packaging/compose.yaml runs its service `tercet`, in namespaces, without an engine.

The network is this machine's, so a test gives each container addresses of its own.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.harness import ROOT, until
from tests.programs import run_program

COMPOSE = ROOT / "deploy/packaging/compose.yaml"
USER = 10001
STOP_S = 40  # compose.yaml's stop_grace_period
# The first words of a command without privileges, and without a way to get any: `cap_drop`, `no-new-privileges`.
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]
AS_USER += ["--bounding-set=-all", "--inh-caps=-all"]


def service() -> dict[str, Any]:
    """The service of compose.yaml."""
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]["tercet"]
    return found


def read_env_file(path: Path) -> dict[str, str]:
    """The variables of a file of `NAME=value` lines, as `env_file` and `docker run --env-file` read it."""
    lines = path.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


class Container:
    """What one container runs, with a volume for the state that outlives it.

    Attributes:
        environ: the image's variables, and those of `tercet.env` and of compose.yaml.
        state: directory that is mounted at /var/lib/tercet.
        models: directory that is mounted at /models.
    """

    def __init__(self, image: Path, config: Mapping[str, Any], base: Path, **settings: object) -> None:
        """
        Args:
            image: the files of the image.
            config: what the image says of `ENV`, `ENTRYPOINT`, `CMD` and `HEALTHCHECK`.
            base: a directory for its files.
            settings: lines of `tercet.env`, without `TERCET_`.
        """
        self._image, self.config = image, config
        self.state, self.models, self.log_path = base / "state", base / "models", base / "log"
        for directory in (self.state, self.models):
            directory.mkdir(parents=True, exist_ok=True)
        os.chown(self.state, USER, USER)
        (image / "models").mkdir(exist_ok=True)  # as an engine makes it for a volume
        env_file = base / Path(service()["env_file"][0]["path"]).name
        env_file.write_text("# Settings\n" + "".join(f"TERCET_{name}={value}\n" for name, value in settings.items()))
        self.environ = dict(entry.split("=", 1) for entry in config["Env"])
        self.environ |= read_env_file(env_file) | service()["environment"]

    def _command(self, arguments: tuple[str, ...], entrypoint: Sequence[str] = ()) -> list[str]:
        compose = service()
        assert (compose["user"], compose["cap_drop"]) == (str(USER), ["ALL"])
        assert compose["security_opt"] == ["no-new-privileges:true"]
        root = self._image
        [(tmp, options)] = [each.split(":") for each in compose["tmpfs"]]
        assert compose["volumes"] == ["state:/var/lib/tercet", "${TERCET_MODEL_DIR:-./models}:/models:ro"]
        mounts = (
            f"mount --bind {root} {root}",
            f"mount -o remount,bind,{'ro' if compose['read_only'] else 'rw'} {root}",
            f"mount --bind {self.state} {root}/var/lib/tercet",
            f"mount --bind {self.models} {root}/models",
            f"mount -o remount,bind,ro {root}/models",
            f"mount -t tmpfs -o {options} tercet {root}{tmp}",
            f"mount -t proc proc {root}/proc",
            f"mount -t sysfs -o ro sys {root}/sys",
            f"mount --rbind /dev {root}/dev",
        )
        enter = f'exec chroot {root} {shlex.join(AS_USER)} sh -c \'cd /opt/tercet && exec "$@"\' sh "$@"'
        program = " && ".join([*mounts, enter])
        words = [*(entrypoint or self.config["Entrypoint"]), *(arguments or self.config["Cmd"])]
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child=TERM"]
        return [*namespaces, "sh", "-c", program, "sh", *words]

    def run(self, *arguments: str, entrypoint: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """`docker compose run tercet ARGUMENTS`, with another entry point or the image's: status and output."""
        return subprocess.run(
            self._command(arguments, entrypoint),
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=240,
        )

    @contextmanager
    def running(self, *arguments: str) -> Iterator[Running]:
        """`docker compose up tercet`, with `arguments` as its command: until TERM has stopped it, which it must survive
        without a failure."""
        with (
            self.log_path.open("wb") as log,
            subprocess.Popen(
                self._command(arguments),
                env=self.environ,
                stdout=log,
                stderr=log,
                process_group=0,
            ) as process,
        ):
            try:
                yield Running(self, process)
            finally:
                if process.poll() is None:
                    os.kill(_child(process.pid), signal.SIGTERM)
                status = process.wait(timeout=STOP_S)
        assert status == 0, self.log_path.read_text()


class Running:
    """A container that runs."""

    def __init__(self, container: Container, process: subprocess.Popen[bytes]) -> None:
        self._container, self._process = container, process

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        """`docker exec`: a command of the container's user inside."""
        inside = ["nsenter", f"--target={_child(self._process.pid)}", "--mount", "--pid", "--root"]
        return run_program([*inside, *AS_USER, *command], env=self._container.environ, timeout=120)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def is_healthy(self) -> bool:
        """Whether the image's HEALTHCHECK succeeds."""
        kind, *command = self._container.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.exec(*command).returncode == 0

    def wait_until_healthy(self) -> None:
        """`docker compose up --wait`."""
        until(lambda: self.has_ended or self.is_healthy(), 180, "healthy")
        self.assert_alive()

    def assert_alive(self) -> None:
        assert not self.has_ended, self._container.log_path.read_text()


def _child(pid: int) -> int:
    """The first process of the container, seen from outside."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return int(until(children.read_text, 10, "a process in the container").split()[0])
