"""The user's home directory, which a container or a service may lack: no `HOME`, and a user that has no account.

`Path.home` raises an error then, and takes an empty or relative `HOME`, which would name another directory in each
process.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path


def home_directory() -> Path | None:
    """`HOME` if it is an absolute path, else the home of the user's account, which may not exist. None: neither."""
    if os.path.isabs(home := os.environ.get("HOME", "")):
        return Path(home)
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None
    return Path(home) if os.path.isabs(home) else None


def absolute_path(text: str) -> Path:
    """The path that a user wrote, absolute; `~` is the home directory, `~name` another user's.

    Raises:
        ValueError: there is no such home directory. The message completes "NAME='text' …".
    """
    first, slash, rest = text.partition("/")
    if first == "~":
        if (home := home_directory()) is None:
            raise ValueError("begins with ~, but this user has no home directory: write an absolute path, or set HOME")
        return home / rest if slash else home
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError(f"begins with {first}, but there is no such user: write an absolute path") from None
