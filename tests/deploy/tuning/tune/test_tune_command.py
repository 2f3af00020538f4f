"""`tercet tune` end to end over real servers. No time is asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from deploy.cli import cli
from shared.errors import StartError
from shared.settings import Settings
from tests.e2e.harness import ROOT, until
from tests.programs import run_program

QUICK = ("--quick", "--model", "embedded", "--clients", "1,2", "--max-workers", "1")


def environ(**settings: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
    return {**own, "COLUMNS": "150", "TERCET_DEVICES": "cpu", "TERCET_DTYPE": "fp32", **settings}


def tune(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, "-m", "deploy", "tune", *arguments], cwd=ROOT, env=environ(**settings))


@pytest.mark.parametrize(
    ("arguments", "settings", "option"),
    [
        (("--clients", "1,many"), {}, "--clients"),
        (("--clients", "0"), {}, "--clients"),
        (("--model", "embedded,small"), {}, "--model"),
        (("--model", "="), {}, "--model"),
        ((), {"TERCET_MODELS": "embedded,synthetic:small"}, "--model"),
        (("--prompt-tokens", "900", "--length", "200"), {}, "--prompt-tokens"),
        (("--qps", "0"), {}, "--qps"),
        (("--slo-ms", "-1"), {}, "--slo-ms"),
        (("--json", "/nonexistent/a.json"), {}, "--json"),
        (("--state", "/dev/null/tune.json"), {}, "--state"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(
    arguments: tuple[str, ...], settings: dict[str, str], option: str
) -> None:
    model = () if settings else ("--model", "embedded")
    done = CliRunner(env={"TERCET_DEVICES": "cpu", "COLUMNS": "150", **settings}).invoke(
        cli, ["tune", *model, *arguments]
    )
    assert done.exit_code != 0
    assert isinstance(done.exception, (StartError, SystemExit))
    assert option in done.stderr + str(done.exception)
    assert not done.stdout


def test_a_run_within_a_budget_recommends_what_it_measured(tmp_path: Path) -> None:
    """The budget is spent after the first plan; the same command could measure the others."""
    state, result = tmp_path / "state.json", tmp_path / "tune.json"
    run = (*QUICK, "--qps", "0.2", "--budget", "0.1", "--state", str(state))
    done = tune(*run, "--json", str(result))
    assert done.returncode == 0, done.stderr
    comments = [line for line in done.stdout.splitlines() if line.startswith("#")]
    lines = done.stdout.splitlines()[len(comments) :]
    settings = Settings.load(dict(line.split("=", 1) for line in lines))
    assert comments[0].startswith("# Quick run:")
    assert comments[-1].startswith("# --budget was spent")
    assert [str(model) for model in settings.model.models] == ["embedded"]
    assert settings.pool.devices == ("cpu",)
    assert settings.pool.cpu_threads == len(os.sched_getaffinity(0))
    document = json.loads(result.read_text())
    [plan] = document["plans"]
    assert plan["candidate"] == document["recommended"]
    assert plan["measurement"]["load_s"] > 0
    assert plan["measurement"]["total_bytes"] > plan["measurement"]["worker_bytes"] > 50 << 20
    loads = [(row["load"]["clients"], row["num_errors"]) for row in plan["measurement"]["figures"]]
    assert loads == [(1, 0), (2, 0), (0, 0)]
    assert plan["measurement"]["figures"][-1]["load"]["rate_qps"] == 0.2
    assert any("--budget" in left["reason"] for left in document["left_out"])
    assert document["environment"] == lines
    assert "Recommended:" in done.stderr
    # All is known now: the command starts no server, and an SLO is decided on the same figures.
    records = state.read_bytes()
    unmet = tune(*run, "--slo-ms", "1")
    assert unmet.returncode == 1
    assert "Plans measured before: 1" in unmet.stderr
    assert "No plan on this machine holds --slo-ms 1 at --qps 0.2" in unmet.stderr
    assert state.read_bytes() == records


def is_alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


@pytest.mark.deploy
def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    state = tmp_path / "tune.json"
    command = [sys.executable, "-m", "deploy", "tune", *QUICK, "--state", str(state)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environ(), stdout=log, stderr=log, process_group=0)
    until(lambda: state.exists() and state.stat().st_size > 0, 120, "the first plan is measured")
    servers = until(lambda: psutil.Process(process.pid).children(recursive=True), 10, "the second plan is started")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "The same command continues. Plans measured so far: 1" in (tmp_path / "log").read_text()
    until(lambda: not any(is_alive(server) for server in servers), 10, "the end of the servers")
    [[first]] = json.loads(state.read_bytes()).values()
    done = tune(*QUICK, "--state", str(state))
    assert done.returncode == 0, done.stderr
    assert "Plans measured before: 1" in done.stderr
    [records] = json.loads(state.read_bytes()).values()
    assert records[0] == first
    measured = [json.dumps(record["candidate"]) for record in records if "measurement" in record]
    assert measured[1] != measured[0]  # the next plan; the best two are measured again at the end
    again = tune(*QUICK, "--state", str(state), "--again", "--budget", "0.1")
    assert again.returncode == 0, again.stderr
    assert "Plans measured before" not in again.stderr
