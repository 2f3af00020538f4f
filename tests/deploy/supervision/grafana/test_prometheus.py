"""The dashboard and the alert rules in a real Prometheus that scrapes a real server (apt-get install prometheus).

Grafana itself is not run: how the panels look is not tested. Their queries are.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import ROOT, Tercet, free_port, running, until
from tests.programs import run_program
from tests.tls import Certificate

GRAFANA = ROOT / "deploy/supervision/grafana"
OUT_OF_MEMORY = 901  # a seed

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus"),
]


class Prometheus:
    """A Prometheus with the example configuration, scraping one server."""

    def __init__(self, base: Path, target: str, authority_pem: bytes) -> None:
        (base / "ca.pem").write_bytes(authority_pem)
        text = (GRAFANA / "prometheus.yml").read_text()
        for old, new in {
            "127.0.0.1:8000": target,
            "# scheme: https": f"scheme: https\n    tls_config: {{ca_file: {base}/ca.pem}}",
            "scrape_interval: 5s": "scrape_interval: 500ms",
            "evaluation_interval: 15s": "evaluation_interval: 500ms",
            "- alerts.yaml": f"- {GRAFANA}/alerts.yaml",
        }.items():
            assert old in text
            text = text.replace(old, new)
        (base / "prometheus.yml").write_text(text)
        port = free_port()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False)
        with (base / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={base}/prometheus.yml",
                    f"--storage.tsdb.path={base}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **parameters: str) -> Any:
        response = self.client.get(path, params=parameters)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    def query(self, expression: str) -> list[float]:
        """The values of all series that an expression yields now."""
        return [float(series["value"][1]) for series in self.get("/query", query=expression)["result"]]

    def rules(self) -> dict[str, dict[str, Any]]:
        """The alert rules by name, once all have been evaluated."""

        def evaluated() -> dict[str, dict[str, Any]] | None:
            rules = {rule["name"]: rule for group in self.get("/rules")["groups"] for rule in group["rules"]}
            return rules if rules and all(rule["health"] != "unknown" for rule in rules.values()) else None

        found: dict[str, dict[str, Any]] = until(evaluated, 20, "the rules' first evaluation")
        return found

    def has_scraped(self) -> bool:
        try:
            response = self.client.get("/query", params={"query": "up"})
        except httpx.TransportError:
            return False
        return response.status_code == 200 and bool(response.json()["data"]["result"])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def tercet(tmp_path_factory: pytest.TempPathFactory, certificate: Certificate) -> Iterator[Tercet]:
    settings = {
        "models": "embedded*2",
        "max_batch": "3",
        "queue": "0",
        "test_step_delay_ms": "0=5,1=5",
        "test_faults": f"{OUT_OF_MEMORY}=oom",
    }
    with running(tmp_path_factory.mktemp("t"), certificate, **settings) as tercet:
        yield tercet


@pytest.fixture(scope="module")
def prometheus(
    tercet: Tercet, certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    target = f"127.0.0.1:{tercet.port}"
    prometheus = Prometheus(tmp_path_factory.mktemp("p"), target, certificate.authority_pem)
    until(prometheus.has_scraped, 20, "the first scrape")
    yield prometheus
    prometheus.client.close()
    prometheus.process.terminate()
    prometheus.process.wait(timeout=20)


def write(tercet: Tercet) -> None:
    """What writers and their editors send: completions, feedback, a job; and more at a time than there is room for."""
    for _ in range(3):
        answer = tercet.ask(length=8)
        for index in range(len(answer["sentences"])):
            report = {"id": answer["id"], "index": index, "action": "accepted"}
            tercet.client.post("/feedback", json=report)
    job = tercet.client.post("/autocomplete", json={"context": "He saw"}, headers={"Prefer": "respond-async"})
    location = job.headers["location"]
    until(lambda: tercet.client.get(location).json()["state"] == "succeeded", 20, "the job")
    with ThreadPoolExecutor(8) as threads:
        bodies = [{"context": f"He saw {number}", "length": 40} for number in range(8)]
        statuses = list(threads.map(lambda body: tercet.client.post("/autocomplete", json=body).status_code, bodies))
    assert {200, 503} <= set(statuses)


def test_every_alert_is_inactive_while_nothing_is_wrong(tercet: Tercet, prometheus: Prometheus) -> None:
    tercet.ask()
    rules = prometheus.rules()
    assert len(rules) >= 14
    assert {name: (rule["health"], rule["state"]) for name, rule in rules.items()} == dict.fromkeys(
        rules, ("ok", "inactive")
    )
    for rule in rules.values():
        prometheus.query(rule["query"])


def test_every_query_of_the_dashboard_has_data(tercet: Tercet, prometheus: Prometheus) -> None:
    write(tercet)
    [_, *workers] = tercet.processes()["workers"]
    workers[1].kill()
    until(lambda: prometheus.query("sum(tercet_slot_restarts_total) > 0"), 30, "the restart")
    tercet.wait_until_warm()
    [_, gateway] = tercet.processes()["gateway"]
    tercet.process.send_signal(signal.SIGHUP)
    until(lambda: prometheus.query('sum(tercet_slot_reloads_total{outcome="succeeded"}) > 1'), 60, "the reload")
    until(lambda: not gateway.is_running(), 30, "the end of the earlier gateway")
    tercet.wait_until_warm()
    failed = tercet.client.post("/autocomplete", json={"context": "He saw", "seed": OUT_OF_MEMORY, "n_samples": 1})
    assert failed.status_code == 503
    write(tercet)
    write(tercet)
    until(lambda: prometheus.query("increase(tercet_jobs_total{event='succeeded'}[1m]) > 0"), 20, "two more scrapes")
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    missing = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
            if not any(map(math.isfinite, prometheus.query(expression))):
                missing.append((panel["title"], expression))
    assert missing == []


def test_an_engine_failure_raises_its_alert_at_once(prometheus: Prometheus) -> None:
    """Its series appears with the failure itself, which `increase` alone would miss."""
    until(lambda: prometheus.rules()["TercetEngineFailures"]["state"] == "firing", 20, "the alert")
    [alert, *_] = prometheus.rules()["TercetEngineFailures"]["alerts"]
    assert alert["annotations"]["runbook"] == "docs/RUNBOOKS.md, section TercetEngineFailures"


def test_the_alerts_are_raised_by_the_series_of_their_unit_tests() -> None:
    done = run_program(["promtool", "test", "rules", "tests/deploy/supervision/grafana/alerts_test.yaml"], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
