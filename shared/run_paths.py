"""Where the run directory of an instance lies if `TERCET_RUN_DIR` does not say it: where no program removes old files,
as programs do in /tmp. Creates nothing, and does not know what the directory holds.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shared.errors import StartError
from shared.home import home_directory

# Linux binds paths of up to 107 bytes (`sun_path` in <sys/un.h>); this keeps a margin.
MAX_SOCKET_PATH_BYTES = 100
LONGEST_SOCKET = "slot-000.sock"
LOCKS = ("serve.lock", "gateway.lock", "workers.lock")  # each held while an instance, or one of its pools, runs
_RUN_USER = Path("/run/user")
_LOGIND = Path("/run/systemd/sessions")
_LINGER = Path("/var/lib/systemd/linger")


def default_run_path(port: int) -> Path:
    """The first of these that can be used, with the port in its name: `$XDG_RUNTIME_DIR`, `/run/user/<uid>`,
    `~/.local/state/tercet`, the directory for temporary files. A directory in which an instance runs comes first: it
    was started in another environment, or by a version that chose otherwise.

    Raises:
        StartError: none can be used.
    """
    places = [*_places(port)]
    for place in places:
        if is_in_use(place):
            return place
    if not places:
        raise StartError("There is no temporary directory that this user can write: set TERCET_RUN_DIR to a directory.")
    return places[0]


def num_socket_path_bytes(run_path: Path) -> int:
    """The length of the longest socket's path in a run directory."""
    return len(os.fsencode(run_path / LONGEST_SOCKET))


def is_in_use(run_path: Path) -> bool:
    """Whether a process holds a lock of an instance in a directory of this user."""
    try:
        if run_path.lstat().st_uid != os.getuid():
            return False
    except OSError:
        return False
    return any(read_lock(run_path / name) is not None for name in LOCKS)


def read_lock(path: Path) -> str | None:
    """What the process that holds a lock has written into its file; None if no process holds it."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return file.read()
    return None


def _places(port: int) -> Iterator[Path]:
    user = os.getuid()
    own = _RUN_USER / str(user)
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    for runtime in dict.fromkeys([*([Path(given)] if os.path.isabs(given) else []), own]):
        if _is_private(runtime) and (runtime != own or _outlives_sessions()):
            yield from _if_short(runtime / f"tercet-{port}")
    home = home_directory()
    if home is not None and _is_writable(home) and _is_writable(_nearest(state := home / ".local/state/tercet")):
        yield from _if_short(state / f"run-{port}")
    with suppress(FileNotFoundError):
        yield Path(tempfile.gettempdir()) / f"tercet-{user}-{port}"


def _if_short(path: Path) -> Iterator[Path]:
    if num_socket_path_bytes(path) <= MAX_SOCKET_PATH_BYTES:
        yield path


def _is_private(path: Path) -> bool:
    """Whether a directory belongs to this user, and to no other."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o077 and _is_writable(path)


def _is_writable(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    while not os.path.lexists(path):
        path = path.parent
    return path


def _outlives_sessions() -> bool:
    """Whether /run/user/<uid> stays when the user logs out: systemd-logind removes it then, unless the user lingers."""
    if not _LOGIND.is_dir():
        return True
    with suppress(KeyError, OSError):
        return (_LINGER / pwd.getpwuid(os.getuid()).pw_name).exists()
    return False
