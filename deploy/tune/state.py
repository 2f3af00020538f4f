"""Keeps what `tercet tune` has measured, so that an interrupted run continues where it was.

One file of JSON lines; each line belongs to a run, which is identified by everything that its figures depend on:
machine, code, model, load and settings. Lines of other runs stay. Does not know what is decided on the figures.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from deploy.tune.results import Candidate, Measurement, merged
from shared.errors import StartError

CODE = ("deploy/load", "gateway", "shared", "workers")


class Record(msgspec.Struct, omit_defaults=True):
    """One line. Either `measurement` or `failure` is set.

    Attributes:
        run: key of the run.
        failure: why the candidate could not be served.
    """

    run: str
    candidate: Candidate
    measurement: Measurement | None = None
    failure: str | None = None


class State:
    """The records of one run."""

    def __init__(self, path: Path, run: str, *, is_new: bool) -> None:
        """
        Args:
            path: the file; created with its directory if it does not exist.
            is_new: forget what this run has measured before.

        Raises:
            StartError: the file cannot be read or written.
        """
        self._path, self._run = path, run
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().splitlines() if path.exists() else []
            records = [*_decode(lines)]
            if is_new or len(records) < len(lines):  # a line that was cut off, or is in another version's format
                records = [record for record in records if not is_new or record.run != run]
                temporary = path.with_name(f"{path.name}.{os.getpid()}")
                temporary.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
                temporary.replace(path)
        except OSError as error:
            raise StartError(
                f"The results cannot be kept in {path} ({error.strerror}): name another file with --state."
            ) from error
        self._records = [record for record in records if record.run == run]

    @property
    def outcomes(self) -> dict[Candidate, Measurement | str]:
        """Each candidate's measurement, merged from all passes, or why it could not be served."""
        failures = {record.candidate: record.failure for record in self._records if record.failure is not None}
        return {candidate: merged(passes) for candidate, passes in self._passes().items()} | failures

    @property
    def num_passes(self) -> dict[Candidate, int]:
        """How often each candidate was measured."""
        return {candidate: len(passes) for candidate, passes in self._passes().items()}

    def _passes(self) -> dict[Candidate, list[Measurement]]:
        found: dict[Candidate, list[Measurement]] = {}
        for record in self._records:
            if record.measurement is not None:
                found.setdefault(record.candidate, []).append(record.measurement)
        return found

    def add(self, candidate: Candidate, **outcome: Any) -> None:
        """Append a `measurement` or a `failure`; it is on the disk when this returns."""
        record = Record(self._run, candidate, **outcome)
        self._records.append(record)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _decode(lines: list[bytes]) -> Iterator[Record]:
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=Record)
        except msgspec.MsgspecError:
            continue


def run_key(identity: Mapping[str, Any]) -> str:
    """A digest of everything that the figures of a run depend on."""
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:16]


def code_digest(root: Path) -> str:
    """SHA-256 of the code that is measured, and of the clients."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (root / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock of the state file.

    Raises:
        StartError: another run holds it; two runs at once would measure each other.
    """
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("ab")
    except OSError as error:
        raise StartError(
            f"The results cannot be kept in {path} ({error.strerror}): name another file with --state."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartError(
                f"Another `tercet tune` is running ({lock_path} is locked): wait for it. Two at once would "
                "measure each other."
            ) from None
        yield
