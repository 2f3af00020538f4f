"""The commands of docs/RAY.md as written, on one node: `ray start`, `serve deploy` with TLS, and a gateway's answer.

Key and certificate are relative paths, as on the page: of the directory of `ray start`, and of that of `tercet serve`.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.harness import ROOT, Tercet, free_port, until
from tests.programs import run_program
from tests.tls import Certificate

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]
BIN = Path(sys.executable).parent
START_S = 180.0


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    certificate = Certificate(tmp_path)
    (tmp_path / "ca.pem").write_bytes(certificate.authority_pem)
    return certificate


@pytest.fixture
def config(tmp_path: Path, certificate: Certificate) -> dict[str, Any]:
    """serve.yaml, with the embedded checkpoint on a CPU and with paths of this machine."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy/cloud/ray/serve.yaml").read_text())
    config["http_options"] |= {
        "host": "127.0.0.1",
        "port": free_port(),
        "ssl_certfile": str(certificate.cert),
        "ssl_keyfile": str(certificate.key),
    }
    [application] = config["applications"]
    application["args"] |= {"model": "embedded", "num_gpus": 0, "min_workers": 1, "max_workers": 1, "num_ingresses": 1}
    key_path = tmp_path / "pool.key"
    key_path.touch(mode=0o600)
    key_path.write_text(secrets.token_hex(32))
    application["runtime_env"]["env_vars"] = {
        "TERCET_POOL_KEY": key_path.name,
        "TERCET_RUN_DIR": str(tmp_path / "run"),
        "TERCET_DTYPE": "fp32",
    }
    return config


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    """The address of a Ray head's dashboard, which `serve` talks to."""
    port = free_port()
    with (tmp_path / "ray.log").open("wb") as log:
        head = subprocess.Popen(
            [
                BIN / "ray",
                "start",
                "--head",
                "--block",
                "--port",
                str(free_port()),
                "--num-cpus",
                "2",
                "--object-store-memory",
                str(100 << 20),
                "--dashboard-port",
                str(port),
                "--dashboard-agent-listen-port",
                str(free_port()),
                "--disable-usage-stats",
            ],
            cwd=tmp_path,
            env=os.environ | {"RAY_enable_worker_prestart": "0"},
            process_group=0,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        head.send_signal(signal.SIGTERM)  # with --block it ends every process of its node
        head.wait(timeout=60)


def serve(*arguments: object) -> str:
    run = run_program([BIN / "serve", *map(str, arguments)], cwd=ROOT, timeout=120)
    return run.stdout + run.stderr


def is_running(status: str) -> bool:
    assert "DEPLOY_FAILED" not in status, status
    time.sleep(2)  # each `serve status` keeps a core busy, which the workers need
    return "status: RUNNING" in status


def test_a_gateway_answers_from_a_pool_that_was_deployed_as_documented(
    tmp_path: Path, config: dict[str, Any], dashboard: str
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    until(
        lambda: "Sent deploy request" in serve("deploy", path, "--address", dashboard), START_S, "Serve has the request"
    )
    until(lambda: is_running(serve("status", "--address", dashboard)), START_S, "the application runs")
    [application] = config["applications"]
    gateway = Tercet(
        tmp_path,
        models="",
        pool=f"embedded=https://localhost:{config['http_options']['port']}/small",
        pool_key=application["runtime_env"]["env_vars"]["TERCET_POOL_KEY"],
        pool_ca="ca.pem",
    )
    gateway.root = tmp_path
    gateway.start(sys.executable, "-m", "deploy", "serve", "--role", "gateway")
    try:
        until(gateway.slots, 60, "the gateway has a slot")
        gateway.wait_until_warm()
        assert len(gateway.ask()["sentences"]) == 3
    finally:
        gateway.stop()
