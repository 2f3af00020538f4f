"""Keeps the branches of one answer on equal weights while a model is being changed slot by slot. Knows no slot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class RevisionPin:
    """The weights that the branches of one request share.

    The first reservation of the request fixes `revision`. It is free again when no branch runs and none has given
    output: the request can then start again with other weights. `Admission` alone writes the first two, under its lock.

    Attributes:
        revision: value of `State.revision`. None if it is not fixed yet.
        num_running: branches that hold room in a slot.
        has_output: a branch has given text or a result, so that the revision is final.
    """

    revision: str | None = None
    num_running: int = 0
    has_output: bool = False
