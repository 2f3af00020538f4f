"""When an instance powers itself off, by the real store; and its systemd unit and set-up script."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cloud.aws import power_off
from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue
from tests.deploy.cloud.aws.stacks import load_template
from tests.e2e.harness import ROOT
from tests.programs import run_program

AWS = ROOT / "deploy/cloud/aws"
DROP_IN = AWS / "tercet.service.d" / "aws.conf"
IDLE = str(power_off.IDLE_STATUS)


def is_powered_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **environ: str) -> bool:
    marker = tmp_path / "powered-off"
    monkeypatch.setattr(power_off, "POWER_OFF", ("touch", str(marker)))
    assert power_off.main({"TERCET_JOBS": f"sqlite:{tmp_path}/jobs.sqlite3", **environ}) == 0
    return marker.exists()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"EXIT_STATUS": IDLE}, True),
        # A store that cannot be reached: a sweep of the function starts the instance again if there is a job.
        ({"EXIT_STATUS": IDLE, "TERCET_JOBS": "sqlite:/"}, True),
        *(({"EXIT_STATUS": status}, False) for status in ("0", "1", "TERM")),
        ({}, False),
    ],
)
def test_only_an_idle_stop_powers_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: bool
) -> None:
    assert is_powered_off(tmp_path, monkeypatch, **environ) == expected


def test_an_open_job_keeps_the_instance_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = JobQueue(open_store(f"sqlite:{tmp_path}/jobs.sqlite3"), ttl_s=60.0, max_open=10)
    job, _ = queue.submit("o", b"{}")
    assert not is_powered_off(tmp_path, monkeypatch, EXIT_STATUS=IDLE)
    queue.cancel_or_delete(job.id, "o")
    queue.close()
    assert is_powered_off(tmp_path, monkeypatch, EXIT_STATUS=IDLE)


def test_the_unit_and_the_template_agree_with_the_code() -> None:
    text = DROP_IN.read_text()
    assert f"tercet serve --idle-status {IDLE}\n" in text
    assert f"SuccessExitStatus={IDLE}\n" in text
    assert "python -m deploy.cloud.aws.power_off\n" in text
    data = load_template("lambda-ec2.yaml")["Resources"]["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    script = data["UserData"]["Fn::Base64"]["Fn::Sub"]
    assert "deploy/cloud/aws/set_up_instance.sh" in script
    for program in (script, (AWS / "set_up_instance.sh").read_text()):
        done = run_program(["bash", "-n"], input=program)
        assert (done.returncode, done.stderr) == (0, "")
