"""The run directory: refused paths, locks, and which files are removed."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from shared.errors import StartError
from shared.masters.run_directory import (
    MARKER_FILE,
    Holder,
    lock_holder,
    lock_run_directory,
    prepare_run_directory,
    remove_lock_file,
    remove_run_files,
    restore_lock,
    restore_run_directory,
)
from tests.settings import make_settings


def test_a_new_or_empty_directory_is_made_private_and_marked(tmp_path: Path) -> None:
    path = prepare_run_directory(make_settings(run_dir=tmp_path / "a" / "r"))
    assert path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "b").mkdir(mode=0o755)
    for given in (path, tmp_path / "b"):
        assert prepare_run_directory(make_settings(run_dir=given)) == given
        assert [entry.name for entry in given.iterdir()] == [MARKER_FILE]


@pytest.mark.parametrize("name", ["notes.txt", "plan.json", "serve.lock", ".hidden"])
def test_a_directory_with_files_and_no_marker_is_refused_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("kept")
    with pytest.raises(StartError, match="not empty and was not created by Tercet"):
        lock_run_directory(make_settings(run_dir=tmp_path), "serve")
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {name: "kept"}


def test_a_symbolic_link_as_marker_or_lock_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    run = tmp_path / "r"
    run.mkdir(mode=0o700)
    (run / MARKER_FILE).symlink_to(target)
    with pytest.raises(StartError, match="not created by Tercet"):
        prepare_run_directory(make_settings(run_dir=run))
    (run / MARKER_FILE).unlink()
    prepare_run_directory(make_settings(run_dir=run))
    (run / "serve.lock").symlink_to(target)
    with pytest.raises(StartError, match="cannot be opened"):
        lock_run_directory(make_settings(run_dir=run), "serve")
    assert target.read_text() == "kept"


def test_what_is_no_private_directory_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, message in (
        ("link", "symbolic link"),
        ("file", "is not a directory"),
        ("x" * 100, "too long for a Unix socket"),
        ("open", "another user"),
    ):
        with pytest.raises(StartError, match=message):
            prepare_run_directory(make_settings(run_dir=tmp_path / name))
    assert list((tmp_path / "there").iterdir()) == list((tmp_path / "open").iterdir()) == []


def test_a_lock_is_exclusive(tmp_path: Path) -> None:
    settings = make_settings(run_dir=tmp_path / "r")
    held = lock_run_directory(settings, "serve")
    with pytest.raises(StartError, match=f"in use by process {os.getpid()}"):
        lock_run_directory(settings, "serve")
    with pytest.raises(StartError, match="in use by process"):
        remove_lock_file(settings, "serve")
    held.close()
    lock_run_directory(settings, "serve").close()


def test_the_holder_of_a_lock_is_known_while_it_holds_it(tmp_path: Path) -> None:
    settings = make_settings(run_dir=tmp_path / "r")
    assert lock_holder(settings, "workers") is None
    for is_supervised in (True, False):
        with lock_run_directory(settings, "workers", is_supervised=is_supervised):
            assert lock_holder(settings, "workers") == Holder(os.getpid(), is_supervised)
        assert lock_holder(settings, "workers") is None


def test_files_are_removed_by_name_and_the_rest_stays(tmp_path: Path) -> None:
    run = prepare_run_directory(make_settings(run_dir=tmp_path / "r"))
    for name in ("plan.json", "slot-0.sock", "slot-9.sock"):
        (run / name).write_text("")
    (run / "draining").mkdir()
    remove_run_files(run, ["plan.json", "slot-0.sock", "draining", "absent"])
    assert {entry.name for entry in run.iterdir()} == {MARKER_FILE, "slot-9.sock", "draining"}
    (run / "slot-9.sock").unlink()
    (run / "draining").rmdir()
    remove_run_files(run, [])
    assert not run.exists()


def test_a_directory_whose_old_files_were_removed_is_marked_again(tmp_path: Path) -> None:
    """Its sockets stay, or a lock that an instance holds."""
    run = prepare_run_directory(make_settings(run_dir=tmp_path / "r"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run / "slot-0.sock"))
    (run / MARKER_FILE).unlink()
    prepare_run_directory(make_settings(run_dir=run))
    (run / "plan.json").write_text("{}")
    with lock_run_directory(make_settings(run_dir=run), "workers"):
        (run / MARKER_FILE).unlink()
        prepare_run_directory(make_settings(run_dir=run))
    (run / MARKER_FILE).unlink()
    with pytest.raises(StartError, match="was not created by Tercet"):
        prepare_run_directory(make_settings(run_dir=run))


@pytest.mark.parametrize("name", ["slot-0.sock", "slot-x.sock", "other.sock"])
def test_what_only_looks_like_a_socket_of_an_instance_is_refused(tmp_path: Path, name: str) -> None:
    if name == "slot-0.sock":
        (tmp_path / name).touch()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / name))
    with pytest.raises(StartError, match="was not created by Tercet"):
        prepare_run_directory(make_settings(run_dir=tmp_path))


def test_a_running_instance_restores_its_directory_and_lock(tmp_path: Path) -> None:
    settings = make_settings(run_dir=tmp_path / "r")
    lock = lock_run_directory(settings, "serve")
    assert restore_lock(settings, "serve", lock) is lock
    shutil.rmtree(settings.run_path)
    restore_run_directory(settings.run_path)
    with restore_lock(settings, "serve", lock) as restored:
        assert lock.closed
        assert lock_holder(settings, "serve") == Holder(os.getpid(), is_supervised=False)
        assert restore_lock(settings, "serve", restored) is restored
    assert (settings.run_path / MARKER_FILE).is_file()
    shutil.rmtree(settings.run_path)
    settings.run_path.symlink_to(tmp_path)
    with pytest.raises(StartError, match="symbolic link"):
        restore_run_directory(settings.run_path)
