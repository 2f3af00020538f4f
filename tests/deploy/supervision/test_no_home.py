"""Users and file systems of containers: no `HOME`, no account, nothing that may be written.

Commands run as a user without an account, which only root can become.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import GUNICORN, ROOT, TERCET, Tercet, serving
from tests.programs import as_user, run_program

UNKNOWN_USER = 54321
AS_UNKNOWN_USER = as_user(UNKNOWN_USER)
READ_ONLY = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -o remount,bind,ro / && mount -o bind,ro /tmp /tmp && exec "$@"',
    "sh",
)
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="apt-get install util-linux"),
]
NEEDS_JOBS = f"Jobs are stored in the home directory, and user {UNKNOWN_USER} has none: set TERCET_JOBS to"


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    os.chown(path, UNKNOWN_USER, UNKNOWN_USER)
    yield path
    shutil.rmtree(path)


def run(
    *command: str, environ: dict[str, str], user: tuple[str, ...] = AS_UNKNOWN_USER
) -> subprocess.CompletedProcess[str]:
    return run_program(
        [*user, *command],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "TERCET_MODELS": "embedded", "COLUMNS": "200", **environ},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("command", "home"), [*(((*TERCET, "serve"), home) for home in (None, "", "home", "~")), (GUNICORN, None)], ids=str
)
def test_a_server_without_a_home_directory_needs_to_know_where_jobs_are_stored(
    run_dir: Path, command: tuple[str, ...], home: str | None
) -> None:
    environ = {"TERCET_RUN_DIR": str(run_dir)} | ({} if home is None else {"HOME": home})
    environ |= {"TERCET_ROLE": "gateway"} if command == GUNICORN else {}
    done = run(*command, environ=environ)
    assert (done.returncode != 0, NEEDS_JOBS in done.stderr, "Traceback" in done.stderr) == (True, True, False)


@pytest.mark.parametrize(
    "command", [["plan"], ["doctor"], ["tune", "--help"], ["settings"], ["serve", "--help"]], ids=str
)
def test_commands_that_store_no_jobs_need_no_home_directory(run_dir: Path, command: list[str]) -> None:
    done = run(*TERCET, *command, environ={"TERCET_RUN_DIR": str(run_dir)})
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TERCET_KEYS": "~/keys"}, "TERCET_KEYS='~/keys' begins with ~, but this user has no home directory"),
        ({"TERCET_JOBS": "sqlite:~/jobs"}, "TERCET_JOBS='sqlite:~/jobs' begins with ~"),
        (
            {"TERCET_CACHE_DIR": "~nobodyx/c"},
            "TERCET_CACHE_DIR='~nobodyx/c' begins with ~nobodyx, but there is no such user",
        ),
        ({"TERCET_MODELS": "x=~/m"}, "The path ~/m of the model x begins with ~"),
        ({"TERCET_MODELS": "small"}, "set HF_HOME to a directory"),
    ],
)
def test_a_setting_that_needs_a_home_directory_is_named(run_dir: Path, environ: dict[str, str], message: str) -> None:
    done = run(*TERCET, "plan", environ={"TERCET_RUN_DIR": str(run_dir), **environ})
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (1, True, False), done.stderr


def test_the_default_model_needs_no_home_directory(run_dir: Path) -> None:
    done = run(*TERCET, "plan", environ={"TERCET_RUN_DIR": str(run_dir), "TERCET_MODELS": ""})
    assert done.returncode == 0, done.stderr
    assert "the model hub's cache needs a home directory" in done.stdout


@pytest.mark.parametrize("prefix", [AS_UNKNOWN_USER, ()], ids=["no account", "an account"])
def test_a_file_system_without_a_place_to_write_is_a_clear_error(prefix: tuple[str, ...]) -> None:
    done = run(*TERCET, "plan", user=(*READ_ONLY, *prefix), environ={"HOME": "/root"})
    if "mount:" in done.stderr:
        pytest.skip("this container may not mount")
    assert done.returncode == 1
    assert "set TERCET_RUN_DIR to a directory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.integration
def test_a_server_that_stores_no_jobs_runs_without_a_home_directory(tmp_path: Path, run_dir: Path) -> None:
    instance = Tercet(tmp_path / "t", jobs="none", run_dir=str(run_dir))
    instance.run_dir = run_dir
    del instance.environ["HOME"]
    instance.command = (*AS_UNKNOWN_USER, *TERCET, "serve")
    with serving(instance):
        assert len(instance.ask(length=3)["sentences"]) == 3
