"""When an instance powers itself off, by its systemd unit; and its set-up script."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.deploy.cloud.aws.stacks import load_template
from tests.e2e.harness import ROOT
from tests.programs import run_program, write_program

AWS = ROOT / "deploy/cloud/aws"
DROP_IN = AWS / "tercet.service.d" / "aws.conf"
IDLE_STATUS = 42


@pytest.mark.parametrize("status", [str(IDLE_STATUS), "0", "1", "TERM", ""])
def test_only_an_idle_stop_powers_off(tmp_path: Path, status: str) -> None:
    write_program(tmp_path / "systemctl", f'echo "$*" >{tmp_path}/called')
    found = re.search(r"^ExecStopPost=\+/bin/sh -c '(.*)'$", DROP_IN.read_text(), re.MULTILINE)
    assert found is not None
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EXIT_STATUS": status}
    done = run_program(["/bin/sh", "-c", found[1].replace("$$", "$")], env=environ)  # systemd reads $$ as $
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "called").exists() == (status == str(IDLE_STATUS))


def test_the_unit_and_the_template_agree_with_the_code() -> None:
    text = DROP_IN.read_text()
    assert f"tercet serve --idle-status {IDLE_STATUS}\n" in text
    assert f"SuccessExitStatus={IDLE_STATUS}\n" in text
    data = load_template("lambda-ec2.yaml")["Resources"]["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    script = data["UserData"]["Fn::Base64"]["Fn::Sub"]
    assert "deploy/cloud/aws/set_up_instance.sh" in script
    for program in (script, (AWS / "set_up_instance.sh").read_text()):
        done = run_program(["bash", "-n"], input=program)
        assert (done.returncode, done.stderr) == (0, "")
