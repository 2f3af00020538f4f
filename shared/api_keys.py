"""API keys: a file of their SHA-256 digests, one JSON object per line.

A key is 256 random bits, so a plain digest cannot be reversed by guessing, and no salt or slow hash is needed. This
module knows the file and compares keys; it does not know HTTP, nor what a key may do.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from shared.errors import StartError
from shared.watched_files import FilesUnsettled, WatchedFiles, open_file

KEY_PREFIX = "tct_"
NUM_KEY_BYTES = 32
# How long a file must be unchanged until a key is refused because its line is gone.
SETTLE_S = 3.0
MAX_BYTES = 64 << 20  # of the file: a line has some 200
_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,100}")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the key file; the key itself is not in it.

    Attributes:
        rate: requests per minute, 0 for no limit; None: `TERCET_KEY_RATE`.
        concurrency: requests that may run or wait at the same time, 0 for no limit; None: `TERCET_KEY_CONCURRENCY`.
    """

    id: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
    name: Annotated[str, Meta(min_length=1, max_length=100)]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    created: datetime
    rate: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    concurrency: Annotated[int, Meta(ge=0, le=4096)] | None = None
    revoked: datetime | None = None


_decode = msgspec.json.Decoder(ApiKey).decode


class KeyFile:
    """The valid keys of a file, read again when the file changes. Thread-safe. To find one, no file is touched.

    A key that the file marks as revoked is refused at the next look, even if other lines or the mode are wrong. While
    something is wrong, all else stays as it was: no key is added, none is lost. A key whose line is gone is refused
    when the file has not been written for `SETTLE_S`, because a file that is being rewritten lacks lines.
    """

    def __init__(self, path: Path) -> None:
        """A file that cannot be read at first makes no key valid until it can; `read_keys` at start reports that
        earlier."""
        self._path = path
        self._valid: tuple[ApiKey, ...] = ()
        self._revoked: frozenset[str] = frozenset()
        self._files = WatchedFiles[tuple[()]]("TERCET_KEYS", (path,), self._read, initial=())

    def find(self, candidates: Sequence[str]) -> ApiKey | None:
        """The record of the first candidate that is a valid key.

        Every candidate is compared with every key, in constant time, so the time does not depend on which key matches.
        """
        _ = self._files.value
        keys = self._valid
        found: ApiKey | None = None
        for candidate in reversed(candidates):
            digest, compare = _digest(candidate), hmac.compare_digest
            matches = [compare(key.sha256, digest) for key in keys]
            if any(matches):
                found = keys[matches.index(True)]
        return found

    def is_revoked(self, key_id: str) -> bool:
        """Whether the file marks this key as revoked. Of an id that it does not have, nothing is known."""
        _ = self._files.value
        return key_id in self._revoked

    def _read(self) -> tuple[()]:
        """
        Raises:
            StartError: as `read_keys`.
            FilesUnsettled: the file lacks keys, and may be about to get them.
        """
        content = _read_file(self._path)
        self._revoked = frozenset(key.id for key in content.keys if key.revoked)
        self._valid = tuple(key for key in self._valid if key.id not in self._revoked)
        if content.error is not None:
            raise content.error
        listed = {key.id for key in content.keys}
        lacking = [key for key in self._valid if key.id not in listed]
        is_settled = not 0 <= time.time() - content.written_at < SETTLE_S
        self._valid = tuple(key for key in content.keys if key.revoked is None)
        if lacking and not is_settled:
            self._valid += tuple(lacking)
            raise FilesUnsettled
        return ()


class _KeyFileContent(NamedTuple):
    """What of a key file can be read. `error`: what is wrong with the rest. `written_at`: Unix seconds."""

    keys: list[ApiKey]
    error: StartError | None
    written_at: float


def read_keys(path: Path) -> list[ApiKey]:
    """All keys of a file, revoked ones included.

    Raises:
        StartError: the file cannot be read, other users may read or write it, or a line is wrong. The message holds
            no contents of the file.
    """
    content = _read_file(path)
    if content.error is not None:
        raise content.error
    return content.keys


def _read_file(path: Path) -> _KeyFileContent:
    """
    Raises:
        StartError: the file cannot be read.
    """
    remedy = "`tercet key new NAME` creates it, or correct the path"
    with open_file(path, f"key file {path} (TERCET_KEYS)", remedy) as opened:
        status, data = os.fstat(opened.fileno()), opened.read(MAX_BYTES)
    wrong = None
    if status.st_mode & _others_mode(status.st_uid, os.geteuid()):
        wrong = f"The key file {path} (TERCET_KEYS) may be read or written by other users: run `chmod 600 {path}`."
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            key = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):  # its message may quote the line
            wrong = wrong or (
                f"Line {number} of the key file {path} (TERCET_KEYS) is not a key that `tercet key new` wrote: "
                "correct or remove it."
            )
            continue
        if key.id in keys:
            wrong = wrong or (f"Line {number} of the key file {path} (TERCET_KEYS) repeats an id: remove one of both.")
        # Of two lines with an id, a revocation counts.
        if key.id not in keys or key.revoked:
            keys[key.id] = key
    return _KeyFileContent([*keys.values()], StartError(wrong) if wrong else None, status.st_mtime)


def _others_mode(owner_id: int, user_id: int) -> int:
    """The bits of a key file's mode that let others read or write it.

    The group may read a file of root that this process, of another user, could open: Kubernetes mounts a secret so.
    """
    return 0o037 if owner_id == 0 != user_id else 0o077


def new_key(path: Path, name: str, rate: int | None = None, concurrency: int | None = None) -> tuple[str, ApiKey]:
    """Append a new key to the file, which is created if it is missing. Returns the key, which is kept nowhere.

    Raises:
        StartError: the name is wrong, or the file cannot be read or written.
    """
    if not _NAME.fullmatch(name):
        raise StartError("The name of a key has 1 to 100 characters and no control characters.")
    key = KEY_PREFIX + secrets.token_urlsafe(NUM_KEY_BYTES)
    with _changing(path) as keys:
        keys.append(
            ApiKey(
                id=secrets.token_hex(6),
                name=name,
                sha256=_digest(key),
                created=_now(),
                rate=rate,
                concurrency=concurrency,
            )
        )
        record = keys[-1]
    return key, record


def revoke_key(path: Path, key_id: str) -> ApiKey:
    """Mark a key as revoked. Its line stays, so that its id is not given to another key.

    Raises:
        StartError: the file has no such key, or cannot be read or written.
    """
    with _changing(path) as keys:
        for index, key in enumerate(keys):
            if key.id == key_id:
                keys[index] = msgspec.structs.replace(key, revoked=key.revoked or _now())
                return keys[index]
    raise StartError(f"The key file {path} has no key with the id {key_id!r}; `tercet key list` shows the ids.")


@contextmanager
def _changing(path: Path) -> Iterator[list[ApiKey]]:
    """The keys of a file, to be changed in place and then written. Writers wait for each other.

    The file is replaced at once, so a reader sees either all of the old or all of the new. It keeps its owner, so that
    a service can still read it after root has changed it.

    Raises:
        StartError: the file cannot be read or written.
    """
    path = path.resolve()  # a symbolic link stays: its target is replaced
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StartError(f"The directory {path.parent} cannot be opened ({error.strerror}): create it.") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        exists = path.exists()
        keys = read_keys(path) if exists else []
        yield keys
        try:
            _replace(path, b"".join(msgspec.json.encode(key) + b"\n" for key in keys), path.stat() if exists else None)
            os.fsync(directory)
        except OSError as error:
            raise StartError(f"The key file {path} cannot be written ({error.strerror}).") from error
    finally:
        os.close(directory)


def _replace(path: Path, content: bytes, old: os.stat_result | None) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
