"""The run directory of one instance: sockets, locks and the slot plan, private to one user.

Files are created and removed by name. A marker file identifies a directory that Tercet created; a directory with other
files and no marker is refused. A running instance makes again what is removed. This module does not know what the files
contain.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO

from shared.errors import StartError, refusing_os_errors
from shared.plain_files import open_lock
from shared.run_paths import MAX_SOCKET_PATH_BYTES, is_in_use, num_socket_path_bytes, read_lock
from shared.settings import Settings

MARKER_FILE = "tercet-run-directory"
_MARKER_TEXT = "Made by Tercet for the sockets, locks and slot plan of one running instance.\n"
_SOCKET_NAME = re.compile(r"slot-[0-9]+\.sock")
_SUPERVISED = "supervised"  # second line of a lock file whose holder has a supervisor


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock. `is_supervised`: `tercet serve` has started it."""

    pid: int
    is_supervised: bool


def prepare_run_directory(settings: Settings) -> Path:
    """Create the run directory, readable by this user only, or check the existing directory.

    Raises:
        StartError: the path is too long for a socket, is a symbolic link or no directory, belongs to or may be
            written by another user, or has files but no marker.
    """
    path = settings.run_path
    longest = num_socket_path_bytes(path)
    if longest > MAX_SOCKET_PATH_BYTES:
        raise StartError(
            f"The run directory {path} is too long for a Unix socket ({longest} bytes with a socket's name, "
            f"at most {MAX_SOCKET_PATH_BYTES}): set TERCET_RUN_DIR to a shorter path."
        )
    _make_directory(path)
    marker = path / MARKER_FILE
    if not _is_regular_file(marker):
        # Only the marker is created here: two masters that start together may both do it.
        if os.path.lexists(marker) or not _may_be_marked(path):
            raise StartError(
                f"The run directory {path} is not empty and was not created by Tercet (it has no file {MARKER_FILE}): "
                "set TERCET_RUN_DIR to a new or an empty directory."
            )
        _write_marker(marker)
    return path


def restore_run_directory(path: Path) -> None:
    """Make the run directory of a running instance again, and mark it, if it is gone or its old files were removed.

    Raises:
        StartError: it cannot be made, or is not this user's any more.
    """
    marker = path / MARKER_FILE
    if not _is_regular_file(marker):
        _make_directory(path)
        _write_marker(marker)


def lock_run_directory(settings: Settings, name: str, *, is_supervised: bool = False) -> IO[str]:
    """Hold `<run directory>/<name>.lock` for as long as the returned file is open.

    Args:
        is_supervised: written to the file, for `lock_holder`.

    Raises:
        StartError: another process holds it, or the run directory is refused.
    """
    path = prepare_run_directory(settings) / f"{name}.lock"
    while True:
        lock = _open_lock(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _holder(lock.read())
            lock.close()
            raise StartError(
                f"The run directory {settings.run_path} is in use by process "
                f"{'(unknown)' if holder is None else holder.pid} ({name}): "
                "stop it, or set TERCET_BIND (and TERCET_RUN_DIR, if you set it) to run a second instance."
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                break
        # A stopping instance removed the file between open and flock: a lock on it would exclude no other process.
        lock.close()
        prepare_run_directory(settings)
    with refusing_os_errors("The lock cannot be written:", path):
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), f"{os.getpid()}\n{_SUPERVISED if is_supervised else ''}\n".encode(), 0)
    return lock


def file_identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another that has taken its place, perhaps with its inode; None if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def restore_lock(settings: Settings, name: str, lock: IO[str], *, is_supervised: bool = False) -> IO[str]:
    """Lock again if the file of a held lock was removed. Returns the lock that is held now.

    Raises:
        StartError: as `lock_run_directory`.
    """
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock.fileno()), (settings.run_path / f"{name}.lock").stat()):
            return lock
    restored = lock_run_directory(settings, name, is_supervised=is_supervised)
    lock.close()
    return restored


def holding_device(settings: Settings, device: str) -> BufferedReader:
    """Wait for the instance's lock of a GPU, and hold it until the file is closed. It ends with its process.

    Raises:
        OSError: its file in the run directory cannot be opened.
    """
    return open_lock(settings.run_path / device_lock_name(device))


def device_lock_name(device: str) -> str:
    """Name of the lock file of `cuda:<n>`."""
    return f"{device.replace(':', '-')}.lock"


def lock_holder(settings: Settings, name: str) -> Holder | None:
    """The process that holds `<run directory>/<name>.lock`, or None."""
    return _holder(read_lock(settings.run_path / f"{name}.lock") or "")


def remove_lock_file(settings: Settings, name: str) -> None:
    """Remove `<run directory>/<name>.lock`, which no process holds.

    Raises:
        StartError: as `lock_run_directory`.
    """
    with (
        lock_run_directory(settings, name),
        refusing_os_errors("The lock cannot be removed:", settings.run_path / f"{name}.lock"),
    ):
        (settings.run_path / f"{name}.lock").unlink()


def remove_run_files(path: Path, names: Iterable[str]) -> None:
    """Remove the named files, and the directory if only its marker is left. Directories are never followed.

    To be called by the process that holds the instance's lock, with the names of files that the instance made.
    """
    for name in names:
        file = path / name
        with suppress(OSError):  # absent, or the file system has become read-only
            if not stat.S_ISDIR(file.lstat().st_mode):
                file.unlink()
    with suppress(OSError):
        if [entry.name for entry in path.iterdir()] == [MARKER_FILE]:
            (path / MARKER_FILE).unlink()
            path.rmdir()


def _make_directory(path: Path) -> None:
    with refusing_os_errors("The run directory cannot be created:", path), suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    _check_directory(path)


def _may_be_marked(path: Path) -> bool:
    """Whether a directory without a marker is empty, or an instance's whose files were removed for their age: programs
    that do so leave sockets and what is locked."""
    names = {entry.name for entry in path.iterdir()} - {MARKER_FILE}
    return all(_is_slot_socket(path / name) for name in names) or is_in_use(path)


def _is_slot_socket(path: Path) -> bool:
    try:
        return bool(_SOCKET_NAME.fullmatch(path.name)) and stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:  # removed meanwhile
        return True


def _check_directory(path: Path) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise StartError(f"The run directory {path} is a symbolic link: set TERCET_RUN_DIR to the directory itself.")
    if not stat.S_ISDIR(status.st_mode):
        raise StartError(f"The run directory {path} is not a directory: set TERCET_RUN_DIR to another path.")
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StartError(
            f"The run directory {path} belongs to, or may be written by, another user: "
            "set TERCET_RUN_DIR to a directory that only you can write."
        )


def _is_regular_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _write_marker(marker: Path) -> None:
    with refusing_os_errors("The run directory cannot be marked:", marker):
        file = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "w") as writer:
            writer.write(_MARKER_TEXT)


def _open_lock(path: Path) -> IO[str]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartError(
            f"The lock {path} cannot be opened ({error.strerror}): remove it, or set TERCET_RUN_DIR."
        ) from error
    return os.fdopen(file, "r+")


def _holder(text: str) -> Holder | None:
    """What the holder of a lock has written, or None if it has not written yet."""
    pid, _, note = text.partition("\n")
    return Holder(int(pid), note.strip() == _SUPERVISED) if pid.isdecimal() else None
