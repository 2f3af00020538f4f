"""The result of a stage as a file that is replaced after each row, so that a process that is killed loses one row.

Knows files and rows. Does not know what a row measures.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

# A stage with one of these states is not run again.
FINAL = ("done", "skipped")


class StageResult(msgspec.Struct, kw_only=True):
    """What is known of a stage.

    Attributes:
        state: partial (cut off, or running), done, skipped, failed, or timed out.
        rows: figures by name, each unit in the name of its field.
        errors: rows that failed, each with its reason.
        skipped: rows that were left out, each with its reason.
    """

    stage: str
    state: str = "partial"
    reason: str = ""
    started_at: str = ""  # ISO 8601, UTC
    elapsed_s: float = 0.0
    is_rehearsal: bool = False
    rows: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    skipped: dict[str, str] = {}


class Skipped(Exception):
    """A row cannot be measured on this machine; the text says why."""


class Recorder:
    """Runs the rows of one stage. A row that an earlier run has measured is not measured again."""

    def __init__(self, path: Path, stage: str, is_rehearsal: bool) -> None:
        self._path = path
        self._start_s = time.monotonic()
        earlier = read_result(path)
        self.result = StageResult(
            stage=stage,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            is_rehearsal=is_rehearsal,
            rows=earlier.rows if earlier is not None and earlier.is_rehearsal == is_rehearsal else {},
        )
        self.write()

    def measure(self, name: str, function: Callable[[], Mapping[str, Any]]) -> None:
        """Add the row that `function` returns; an exception becomes the row's error, and the stage continues."""
        if name in self.result.rows:
            return
        try:
            self.result.rows[name] = dict(function())
        except Skipped as error:
            self.result.skipped[name] = str(error)
        except Exception as error:  # noqa: BLE001 - each row stands alone
            traceback.print_exception(error)  # into the stage's log
            self.result.errors[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self.write()

    def finish(self) -> None:
        """The stage has run to its end."""
        result = self.result
        result.state = "done" if result.rows else "failed" if result.errors else "skipped"
        reasons = result.errors or (result.skipped if not result.rows else {})
        result.reason = next(iter(reasons.values()), "")
        if result.rows and result.errors:
            result.reason = f"{len(result.errors)} of {len(result.rows) + len(result.errors)} rows failed"
        self.write()

    def write(self) -> None:
        self.result.elapsed_s = round(time.monotonic() - self._start_s, 1)
        write_json(self._path, self.result)


def write_json(path: Path, content: object) -> None:
    """Replace the file as a whole: a reader never sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(content, enc_hook=str), indent=1))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_result(path: Path) -> StageResult | None:
    """The result in a file; None if there is none, or it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StageResult)
    except (OSError, msgspec.MsgspecError):
        return None
