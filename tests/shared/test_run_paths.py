"""Where the run directory lies by default, and that an instance which runs elsewhere is found."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from shared import run_paths
from shared.errors import StartError
from shared.masters.run_directory import lock_run_directory
from shared.run_paths import MAX_SOCKET_PATH_BYTES, default_run_path, num_socket_path_bytes
from shared.settings import Settings
from tests.settings import make_settings

PORT = 8000


@pytest.fixture(autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory, a home and a directory for temporary files under one directory; no logind."""
    base = tmp_path_factory.mktemp("p")
    for name in ("run", "home", "tmp"):
        (base / name).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "run"))
    monkeypatch.setenv("HOME", str(base / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(base / "tmp"))
    monkeypatch.setattr(run_paths, "_LOGIND", base / "logind")
    monkeypatch.setattr(run_paths, "_LINGER", base / "linger")
    monkeypatch.setattr(run_paths, "_RUN_USER", base / "user")
    return base


def old_default(base: Path) -> Path:
    return base / "tmp" / f"tercet-{os.getuid()}-{PORT}"


def test_the_users_runtime_directory_comes_first(places: Path) -> None:
    assert default_run_path(PORT) == places / "run" / "tercet-8000"
    assert Settings.load({"TERCET_BIND": "127.0.0.1:8001"}).run_path == places / "run" / "tercet-8001"
    assert Settings.load({"TERCET_RUN_DIR": "/x"}).run_path == Path("/x")


@pytest.mark.parametrize("given", ["", "relative", "/nowhere", "open to others", "long"])
def test_a_runtime_directory_that_cannot_be_used_is_passed_over(
    places: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    if given == "open to others":
        (places / "run").chmod(0o755)
    elif given == "long":  # for the names of sockets
        long = places / ("x" * (MAX_SOCKET_PATH_BYTES - len(os.fsencode(places)) - 20))
        long.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
    path = default_run_path(PORT)
    assert path == places / "home/.local/state/tercet/run-8000"
    assert num_socket_path_bytes(path) <= MAX_SOCKET_PATH_BYTES
    (own := places / "user" / str(os.getuid())).mkdir(mode=0o700, parents=True)
    assert default_run_path(PORT) == own / "tercet-8000"


@pytest.mark.parametrize("lingers", [False, True])
def test_what_ends_with_the_session_is_passed_over(
    places: Path, monkeypatch: pytest.MonkeyPatch, lingers: bool
) -> None:
    own = places / "user" / str(os.getuid())
    own.mkdir(mode=0o700, parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    (places / "logind").mkdir()
    if lingers:
        (places / "linger").mkdir()
        (places / "linger" / pwd.getpwuid(os.getuid()).pw_name).touch()
    expected = own / "tercet-8000" if lingers else places / "home/.local/state/tercet/run-8000"
    assert default_run_path(PORT) == expected


@pytest.mark.parametrize("home", ["/nonexistent", "long"])
def test_without_a_usable_home_it_is_the_temporary_directory(
    places: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    if home == "long":
        (places / ("x" * 80)).mkdir()
        home = str(places / ("x" * 80))
    monkeypatch.setenv("HOME", home)
    assert default_run_path(PORT) == old_default(places)


@pytest.mark.parametrize("name", ["serve", "gateway", "workers"])
def test_an_instance_of_the_old_default_is_found_while_it_runs(places: Path, name: str) -> None:
    """For `tercet reload` after an upgrade. When it has stopped, the next one starts in the new place."""
    old = old_default(places)
    with lock_run_directory(make_settings(run_dir=old), name):
        assert default_run_path(PORT) == old
        assert default_run_path(PORT + 1) == places / "run" / "tercet-8001"
    assert default_run_path(PORT) == places / "run" / "tercet-8000"


def test_an_instance_is_found_from_another_environment(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with lock_run_directory(make_settings(run_dir=default_run_path(PORT)), "serve"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(places / "run"))
        assert default_run_path(PORT) == places / "home/.local/state/tercet/run-8000"


def test_no_place_at_all_is_a_clear_error(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", "/nonexistent")

    def fail() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(StartError, match="set TERCET_RUN_DIR to a directory"):
        default_run_path(PORT)


def test_located_settings_keep_their_place(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.load({}).located()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert settings.run_path == places / "run" / "tercet-8000"
