"""Classes of requests, by what they need. `gateway.server.work_queue` has the queue of a class."""

from __future__ import annotations

import enum


class Work(enum.Enum):
    """What a request wants. `PIPELINED`: it was sent before the response to the last one was complete."""

    COMPLETIONS = enum.auto()
    TOKENIZING = enum.auto()
    JOBS = enum.auto()
    FEEDBACK = enum.auto()
    READS = enum.auto()
    HEALTH = enum.auto()
    PIPELINED = enum.auto()
