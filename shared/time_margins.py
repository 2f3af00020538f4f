"""The account of a request's time: how much earlier each part ends, so that the next has time for what it has to do.

client ◄─ gateway: answers by the deadline, `collect_s` later at the latest
            └ worker: gets a deadline `return_s` earlier
                └ engine: ends with the step that runs at the deadline, `step_s` later at the latest
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeMargins:
    """Seconds.

    Attributes:
        step_s: a decode step may end this long after a sequence's deadline.
        return_s: a worker's deadline is this much earlier than the request's, so that a partial completion arrives in
            time.
        collect_s: a branch's last events can still be on their way when the request's deadline passes: the gateway
            waits this much longer for them.
        silence_s: a worker sends its state at least once a second; after this time without a line it counts as down.
        cancel_s: a gateway that stops cancels the remaining requests this long before its grace ends, so that their
            answers can still leave.
    """

    step_s: float = 0.01
    return_s: float = 0.005
    collect_s: float = 0.03
    silence_s: float = 3.0
    cancel_s: float = 0.75


MARGINS = TimeMargins()
