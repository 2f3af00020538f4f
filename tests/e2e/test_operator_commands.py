"""`tercet health`, `complete` and `reload` as an operator runs them: with little of the server's environment."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.e2e.harness import START_S, Tercet, run_alone, serving, until
from tests.e2e.remote_pool import Workers
from tests.e2e.shared_servers import SharedServer
from tests.tls import Certificate


def address(tercet: Tercet) -> dict[str, str]:
    return {name: tercet.environ[name] for name in ("TERCET_BIND", "TERCET_RUN_DIR")}


def test_health_follows_the_address(tercet: SharedServer) -> None:
    done = run_alone("health", **address(tercet))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ready", "")
    assert run_alone("health", "--live", **address(tercet)).stdout.strip() == "live"
    done = run_alone("health", TERCET_BIND="127.0.0.1:9", TERCET_RUN_DIR=tercet.environ["TERCET_RUN_DIR"] + "-other")
    assert done.returncode == 1
    assert "The gateway does not answer at http://127.0.0.1:9" in " ".join(done.stderr.split())


def test_health_and_complete_follow_tls_and_say_what_they_lack(
    secure: SharedServer, certificate: Certificate, tmp_path: Path
) -> None:
    other = Certificate(tmp_path, "other")
    tls = {f"TERCET_{name.upper()}": value for name, value in certificate.settings.items()}
    wrong = {"TERCET_TLS_CERT": str(other.cert), "TERCET_TLS_KEY": str(other.key)}
    assert run_alone("health", **address(secure), **tls).returncode == 0
    assert run_alone("complete", "The sea", **address(secure), **tls).returncode == 0
    for command in (("health",), ("health", "--live"), ("complete", "The sea")):
        done = run_alone(*command, **address(secure))
        assert done.returncode == 1
        assert "serves HTTPS: set TERCET_TLS_CERT" in done.stderr
        assert "another certificate than TERCET_TLS_CERT" in run_alone(*command, **address(secure), **wrong).stderr


def test_health_of_an_instance_that_cannot_load_says_so(tmp_path: Path) -> None:
    tercet = Tercet(tmp_path / "t", test_load_faults="0=device")
    tercet.start()
    try:
        until(lambda: run_alone("health", "--live", **address(tercet)).returncode == 0, START_S, "the gateway answers")
        done = run_alone("health", **address(tercet))
        assert done.returncode == 1
        assert re.search(r"is not ready \(starting\): slot 0 \w+", " ".join(done.stderr.split()))
    finally:
        tercet.process.send_signal(signal.SIGTERM)
        tercet.process.wait(60)


def test_health_asks_the_workers_where_only_they_run_alone(tmp_path: Path) -> None:
    with serving(Workers(tmp_path / "t", 1)) as workers:
        assert run_alone("health", **address(workers)).stdout.strip() == "ready"
