"""Files that are read again when they change, and keys compared without an early end."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared import watched_files
from shared.errors import StartError
from shared.pool_keys import is_pool_key
from shared.watched_files import WatchedFiles, open_file

PATIENCE_S = 10.0


def number_file(path: Path) -> WatchedFiles[int]:
    def read() -> int:
        with open_file(path, "number") as file:
            text = file.read()
        if not text.isdigit():
            raise StartError("no number")
        return int(text)

    return WatchedFiles("number", (path,), read)


def wait_for(files: WatchedFiles[int], value: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while files.value != value:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_change_is_seen_and_a_mistake_keeps_the_value(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    files = number_file(path)
    path.write_text("22")
    wait_for(files, 22)
    path.write_text("none")
    files.look()
    assert files.value == 22
    path.write_text("333")
    wait_for(files, 333)


def test_a_file_that_hangs_keeps_the_value_delays_no_caller_and_is_read_when_it_answers(tmp_path: Path) -> None:
    """A fake for a network file system that is away: `read` does not return."""
    path, answers, has_hung = tmp_path / "number", threading.Event(), threading.Event()
    path.write_text("1")
    is_away = False

    def read() -> int:
        if is_away:
            has_hung.set()
            answers.wait()
        return int(path.read_text())

    files = WatchedFiles("number", (path,), read)
    is_away = True
    path.write_text("22")
    assert files.value == 1
    assert has_hung.wait(PATIENCE_S)
    began_at = time.monotonic()
    assert {files.value for _ in range(1000)} == {1}
    assert time.monotonic() - began_at < 1
    answers.set()
    wait_for(files, 22)


def test_a_file_that_hangs_at_the_start_refuses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watched_files, "START_S", 0.1)
    answers = threading.Event()
    with pytest.raises(StartError, match=r"number was not read within 0\.1 s"):
        WatchedFiles("number", (tmp_path,), answers.wait)
    answers.set()


def test_what_is_no_file_is_refused_without_a_wait_and_the_file_in_its_place_is_read(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    files = number_file(path)
    path.unlink()
    os.mkfifo(path)
    with capture_logs() as logs:
        files.look()
    assert "not a regular file" in logs[0]["reason"]
    with pytest.raises(StartError, match="not a regular file"), open_file(Path("/dev/zero"), "zero"):
        pass
    assert files.value == 1
    path.unlink()
    path.write_text("22")
    wait_for(files, 22)


def test_a_thread_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake for the limit of threads."""
    path = tmp_path / "number"
    path.write_text("1")
    files = number_file(path)
    path.write_text("22")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        assert files.value == 1
    wait_for(files, 22)


def no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "Basic ", "", "Bearer"])
def test_a_bearer_key_of_the_file_is_valid(scheme: str) -> None:
    for key in ("a" * 32, "b" * 32):
        assert is_pool_key(scheme + key, ("a" * 32, "b" * 32)) is (scheme in {"Bearer ", "bearer "})
    for wrong in ("a" * 31, "\udcff", ""):
        assert not is_pool_key(scheme + wrong, ("a" * 32, "b" * 32))
