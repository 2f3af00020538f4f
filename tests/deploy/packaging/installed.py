"""Starts, asks, reloads and stops a Tercet that is installed as a package, as its user would."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from shared.version import tercet_version
from tests.e2e.harness import free_port, until
from tests.programs import run_program

START_S = 240
STOP_S = 60
CONTEXT = "The old man looked at the sea and"


def environ_of(folder: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TERCET_", "PYTHON"))}
    own |= {"PYTHONPATH": ".", "TERCET_MODELS": "embedded", "TERCET_DEVICES": "cpu", "TERCET_CPU_THREADS": "1"}
    return own | {"TERCET_RUN_DIR": str(folder / "run"), "TERCET_CACHE_DIR": str(folder / "cache")}


@contextmanager
def serving(command: Sequence[str], folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is started in a folder with a module `shared` of its own, as a user's project may have.

    Args:
        command: what stands for `tercet`.
    """
    folder.mkdir()
    (folder / "shared").mkdir()
    (folder / "shared" / "__init__.py").write_text("raise ImportError('shared of the working directory')")
    address = f"127.0.0.1:{free_port()}"
    environ = environ_of(folder) | {"TERCET_BIND": address}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, "serve"], cwd=folder, env=environ, stdout=log, stderr=log, text=True)
        try:
            yield process, f"http://{address}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)


def check_serving(command: Sequence[str], folder: Path) -> None:
    """Serve, complete, show the page, reload, run commands, and stop.

    Raises:
        AssertionError: something failed; the message has its output.
    """
    with serving(command, folder) as (process, url), httpx.Client(base_url=url, trust_env=False, timeout=30) as client:

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                return client.get("/health/ready").status_code == 200
            except httpx.TransportError:
                return False

        until(is_ready, START_S, "the installed server is ready")
        assert client.get("/health/ready").json()["version"] == tercet_version()
        assert len(client.post("/autocomplete", json={"context": CONTEXT}).json()["sentences"]) == 3
        assert "<title>" in client.get("/", headers={"Accept": "text/html"}).text
        environ = environ_of(folder) | {"TERCET_BIND": url.removeprefix("http://")}
        for arguments in (["reload"], ["doctor"], ["plan"], ["complete", CONTEXT]):
            done = run_program([*command, *arguments], cwd=folder, env=environ)
            assert done.returncode == 0, done.stdout + done.stderr
        assert len(client.post("/autocomplete", json={"context": CONTEXT}).json()["sentences"]) == 3
    assert process.returncode == 0, (folder / "log").read_text()
