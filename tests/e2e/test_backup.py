"""A backup as docs/OPERATIONS.md has it: the key file is copied, and the job file by SQLite, while it is used."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from shared.api_keys import new_key
from tests.e2e.harness import running, until

PROMPT = "The old man looked at the sea and"


def copy_jobs(source: Path, target: Path) -> None:
    """What `sqlite3 SOURCE ".backup TARGET"` does; Debian's `sqlite3` need not be installed."""
    with closing(sqlite3.connect(source)) as connection, closing(sqlite3.connect(target)) as copy:
        connection.backup(copy)


def test_keys_and_jobs_are_restored(short_tmp_path: Path) -> None:
    keys, backup = short_tmp_path / "keys", short_tmp_path / "backup"
    backup.mkdir()
    key, _ = new_key(keys, "editor")
    settings = {"keys": str(keys), "api_key": key}
    with running(short_tmp_path / "before", **settings) as tercet:

        def post(**fields: object) -> str:
            response = tercet.client.post("/jobs", json={"prompt": PROMPT, **fields}, headers=tercet.key_headers)
            assert response.status_code == 202, response.text
            return str(response.json()["id"])

        def state(job: str) -> str:
            return str(tercet.client.get(f"/jobs/{job}", headers=tercet.key_headers).json()["state"])

        done = post(length=4)
        until(lambda: state(done) == "succeeded", 60, "the first job succeeds")
        still_open = [post(length=200) for _ in range(3)]
        assert state(still_open[-1]) in {"queued", "running"}
        copy_jobs(short_tmp_path / "before/jobs.sqlite3", backup / "jobs.sqlite3")
        shutil.copy(keys, backup / "keys")
        later = post(length=4)
    keys.unlink()
    restored = short_tmp_path / "restored"
    restored.mkdir()
    shutil.copy(backup / "jobs.sqlite3", restored / "jobs.sqlite3")
    shutil.copy(backup / "keys", keys)
    keys.chmod(0o600)
    with running(restored, **settings) as tercet:
        for job in (done, *still_open):
            until(lambda: state(job) == "succeeded", 60, "a job of the backup succeeds")  # noqa: B023
        assert tercet.client.get(f"/jobs/{later}", headers=tercet.key_headers).status_code == 404
        assert tercet.client.get(f"/jobs/{done}").status_code == 401
