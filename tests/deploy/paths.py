"""Every setting that is a path, relative, in a folder of the user's: what a server and `tercet reload` take it for."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import httpx
import psutil

from shared.settings import PREFIX, Settings
from tests.e2e.harness import ROOT, free_port, until
from tests.programs import run_program
from tests.tls import Certificate

START_S = 240
STOP_S = 60
EMBEDDED = ROOT / "workers/checkpoints/embedded"
# The other variables that may hold a path; tests/shared/test_settings.py finds them.
TEXTS = {"TERCET_JOBS": "sqlite:jobs.sqlite3", "TERCET_MODELS": "near=./model,sub=sub/model"}
PATHS = {
    "TERCET_CACHE_DIR": "cache",
    "TERCET_KEYS": "keys",
    "TERCET_POOL_CA": "../ca.pem",
    "TERCET_POOL_KEY": "pool.key",
    "TERCET_POOL_TLS_CERT": "tls.crt",
    "TERCET_POOL_TLS_KEY": "tls.key",
    "TERCET_RUN_DIR": "run",
    "TERCET_TLS_CERT": "tls.crt",
    "TERCET_TLS_KEY": "./tls.key",
}


def path_settings() -> set[str]:
    """The variables of all settings that are paths."""
    found = set()
    for group in get_type_hints(Settings).values():
        kinds = get_type_hints(group)
        for setting in fields(group):
            if "Path" in str(kinds[setting.name]):
                found.add(PREFIX + (setting.metadata["name"] or setting.name.upper()))
    return found


def check_relative_paths(command: Sequence[str], base: Path) -> None:
    """Serve from a folder with every path relative: its gateway uses its own workers' ports as a remote pool too.

    Args:
        command: what stands for `tercet`.
        base: an empty folder with a short path.

    Raises:
        AssertionError: a path was taken from elsewhere.
    """
    assert path_settings() == PATHS.keys()
    folder = base / "Büro 1"
    (folder / "sub").mkdir(parents=True)
    (folder / "gateway.py").write_text("raise ImportError('gateway of the working directory')")
    for name in ("model", "sub/model"):
        shutil.copytree(EMBEDDED, folder / name)
    certificate = Certificate(folder)
    (base / "ca.pem").write_bytes(certificate.authority_pem)
    (folder / "pool.key").touch(mode=0o600)
    (folder / "pool.key").write_text(secrets.token_hex(32))
    port, pool_port = free_port(), free_port()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)} | {
        **PATHS,
        **TEXTS,
        "TERCET_BIND": f"127.0.0.1:{port}",
        "TERCET_POOL_BIND": f"127.0.0.1:{pool_port}",
        "TERCET_POOL": f"near=https://localhost:{pool_port}",
        "TERCET_DEVICES": "cpu",
        "TERCET_DRAIN_S": "0",
    }

    def run(*arguments: str, cwd: Path = folder, **changed: str) -> str:
        done = run_program([*command, *arguments], cwd=cwd, env=environ | changed)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    key = run("key", "new", "a")
    with (base / "log").open("w") as log:
        process = subprocess.Popen([*command, "serve"], cwd=folder, env=environ, stdout=log, stderr=log)
    try:
        with httpx.Client(
            base_url=f"https://localhost:{port}",
            headers={"Authorization": f"Bearer {key}"},
            verify=certificate.client(),
            trust_env=False,
            timeout=30,
        ) as client:

            def warm_slots() -> int:
                assert process.poll() is None, (base / "log").read_text()
                time.sleep(0.2)  # a key may send 20 requests a second
                try:
                    return sum(slot["state"] == "warm" for slot in client.get("/slots").json().get("slots", ()))
                except httpx.TransportError:
                    return 0

            def workers() -> set[psutil.Process]:
                masters = psutil.Process(process.pid).children()
                return {worker for master in masters for worker in master.children()}

            until(lambda: warm_slots() == 3, START_S, "two slots here and one of the pool are warm")
            assert client.post("/autocomplete", json={"context": "The sea"}).status_code == 200
            body = {"context": "The sea"}
            assert client.post("/autocomplete", json=body, headers={"Authorization": "Bearer x"}).status_code == 401
            # Settings of the server, from another folder: its paths begin where it was started.
            others = {name: "" for name in environ if name.startswith(PREFIX)}
            run("reload", cwd=base, **others | {"TERCET_RUN_DIR": str(folder / "run")})
            old = workers()
            assert {worker.cwd() for worker in old} == {str(folder)}  # for variables of libraries, like SSL_CERT_FILE
            process.send_signal(signal.SIGHUP)
            until(lambda: old.isdisjoint(workers()) and warm_slots() == 3, START_S, "new workers are warm")
        assert (folder / "run/plan.json").is_file()
        assert (folder / "cache/default-model").is_file()
        assert (folder / "jobs.sqlite3").is_file()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
    assert process.returncode == 0, (base / "log").read_text()
