"""Keeps what `tercet tune` has measured, so that an interrupted run continues where it was.

One JSON file with the results of all runs, replaced with each result; a run is identified by everything that its
figures depend on: machine, code, model, load and settings. Does not know what is decided on the figures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from deploy.terminal import json_lines
from deploy.tuning.tune.results import Candidate, Measurement, merged
from shared.errors import StartError
from shared.plain_files import open_lock

CODE = ("deploy/tuning/load", "deploy/tuning/tune", "gateway", "shared", "workers")


class Record(msgspec.Struct, omit_defaults=True):
    """A candidate with its `measurement` or its `failure`: why it could not be served."""

    candidate: Candidate
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
        self._path = path
        self.outcomes: dict[Candidate, Measurement | str] = {}
        self._passes: dict[Candidate, list[Measurement]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = open_lock(path.with_name(f"{path.name}.lock"), timeout_s=0)
            content = path.read_bytes() if path.exists() else b""
        except TimeoutError:
            raise StartError(
                f"Another `tercet tune` is running ({path} is locked): wait for it. Two at once would measure each "
                "other."
            ) from None
        except OSError as error:
            raise StartError(
                f"The results cannot be kept in {path} ({error.strerror}): name another file with --state."
            ) from error
        try:
            self._runs = msgspec.json.decode(content, type=dict[str, list[Record]])
        except msgspec.MsgspecError:  # a new file, or one in another version's format
            self._runs = {}
        if is_new:
            self._runs.pop(run, None)
        self._records = self._runs.setdefault(run, [])
        for record in self._records:
            self._accept(record)

    def add(self, candidate: Candidate, **outcome: Any) -> None:
        """Add a `measurement` or a `failure`; it is in the file when this returns."""
        self._records.append(record := Record(candidate, **outcome))
        self._accept(record)
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_bytes(json_lines(self._runs))
        new.replace(self._path)

    def close(self) -> None:
        self._lock.close()

    def _accept(self, record: Record) -> None:
        if record.measurement is None:
            self.outcomes[record.candidate] = record.failure or ""
        else:
            passes = self._passes.setdefault(record.candidate, [])
            passes.append(record.measurement)
            self.outcomes[record.candidate] = merged(passes)


def run_key(identity: Mapping[str, Any]) -> str:
    """A digest of everything that the figures of a run depend on."""
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:16]


def code_digest(root: Path) -> str:
    """SHA-256 of the code that is measured, and of the clients."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (root / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
