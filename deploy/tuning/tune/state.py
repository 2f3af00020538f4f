"""Keeps what `tercet tune` has measured, so that an interrupted run continues where it was.

One file of JSON lines, to which lines are only appended; each belongs to a run, which is identified by everything that
its figures depend on: machine, code, model, load and settings. Does not know what is decided on the figures.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from deploy.tuning.tune.results import Candidate, Measurement, merged
from shared.errors import StartError

CODE = ("deploy/tuning/load", "deploy/tuning/tune", "gateway", "shared", "workers")


class Record(msgspec.Struct, omit_defaults=True):
    """One line: a candidate with its `measurement` or its `failure`. Without a candidate: the run began anew.

    Attributes:
        run: key of the run.
        failure: why the candidate could not be served.
    """

    run: str
    candidate: Candidate | None = None
    measurement: Measurement | None = None
    failure: str | None = None


class State:
    """The records of one run, and a lock of the file until `close`.

    Attributes:
        outcomes: each candidate's measurement, merged from all passes, or why it could not be served.
    """

    def __init__(self, path: Path, run: str, *, is_new: bool) -> None:
        """
        Args:
            path: the file; created with its directory if it does not exist.
            is_new: forget what this run has measured before.

        Raises:
            StartError: the file cannot be read or written, or another run holds it.
        """
        self._run = run
        self.outcomes: dict[Candidate, Measurement | str] = {}
        self._passes: dict[Candidate, list[Measurement]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            content = self._file.read()
        except BlockingIOError:
            self._file.close()
            raise StartError(
                f"Another `tercet tune` is running ({path} is locked): wait for it. Two at once would measure each "
                "other."
            ) from None
        except OSError as error:
            raise StartError(
                f"The results cannot be kept in {path} ({error.strerror}): name another file with --state."
            ) from error
        if content and not content.endswith(b"\n"):  # an interrupted write
            self._file.write(b"\n")
        for line in content.splitlines():
            with suppress(msgspec.MsgspecError):  # cut off, or in another version's format
                self._accept(msgspec.json.decode(line, type=Record))
        if is_new:
            self._append(Record(run))

    def add(self, candidate: Candidate, **outcome: Any) -> None:
        """Append a `measurement` or a `failure`; it is on the disk when this returns."""
        self._append(Record(self._run, candidate, **outcome))

    def close(self) -> None:
        self._file.close()

    def _append(self, record: Record) -> None:
        self._accept(record)
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _accept(self, record: Record) -> None:
        if record.run != self._run:
            return
        candidate, measurement = record.candidate, record.measurement
        if candidate is None:
            self.outcomes.clear()
            self._passes.clear()
        elif measurement is not None:
            passes = self._passes.setdefault(candidate, [])
            passes.append(measurement)
            self.outcomes[candidate] = merged(passes)
        else:
            self.outcomes[candidate] = record.failure or ""


def run_key(identity: Mapping[str, Any]) -> str:
    """A digest of everything that the figures of a run depend on."""
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:16]


def code_digest(root: Path) -> str:
    """SHA-256 of the code that is measured, and of the clients."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (root / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
