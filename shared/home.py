"""What the paths that a user writes mean: relative to the directory where Tercet was started, or to the home directory.

A container or a service may lack a home directory: no `HOME`, and a user that has no account. `Path.home` raises an
error then, and takes an empty or relative `HOME`, which would name another directory in each process.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

START_DIRECTORY = "TERCET_START_DIR"  # for processes that run in the installation's directory


def home_directory() -> Path | None:
    """`HOME` if it is an absolute path, else the home of the user's account, which may not exist. None: neither."""
    if os.path.isabs(home := os.environ.get("HOME", "")):
        return Path(home)
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None
    return Path(home) if os.path.isabs(home) else None


def start_directory() -> str:
    """Where relative paths begin; empty if that directory was removed before the start."""
    try:
        return os.environ[START_DIRECTORY] if START_DIRECTORY in os.environ else os.getcwd()
    except OSError:
        return ""


def absolute_path(text: str) -> Path:
    """The path that a user wrote, absolute; `~` is the home directory, `~name` another user's.

    Raises:
        ValueError: there is no such home directory, or no directory where a relative path begins. The message completes
            "NAME='text' …".
    """
    first, slash, rest = text.partition("/")
    if first == "~":
        if (home := home_directory()) is None:
            raise ValueError("begins with ~, but this user has no home directory: write an absolute path, or set HOME")
        return home / rest if slash else home
    try:
        path = start_directory() / Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"begins with {first}, but there is no such user: write an absolute path") from None
    if not path.is_absolute():
        raise ValueError("is relative, but the current directory was removed: write an absolute path")
    return path
