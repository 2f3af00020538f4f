"""The part of a model's room that one owner (API key) may fill while others use the model too.

A request that waits for room waits for sequences to end, not for its turn: where one owner fills all slots with long
prompts, the next request of another waits for a whole generation, however fair the queue is. And on a CPU each sequence
makes the steps of all others longer. So an owner beyond its equal share of the room leaves some free for those that
want no more than theirs. Where all want more, they fill the room together: none of them would be answered sooner.

Requests of sessions keep to their owner's share in any case. An engine that decodes those of all sessions together
slows each of them down until none ends before the next key, which supersedes it.
No lock: `Admission` holds its own.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping

from gateway.waiting.fair_queue import Line

# An owner beyond its share leaves an eighth of the room to others. Of the default batch it is six branches, two
# requests of three: one for a request that comes, and one for the next, before a sequence of the first has ended.
HEADROOM_DIVISOR = 8
# Who has sent no request for this long does not count. An editor sends one at least every few seconds.
RECENT_S = 10.0


class OwnerShares:
    """Branches in flight of each owner, in the slots of one model, and how many of them are of sessions."""

    def __init__(self) -> None:
        self._num_branches: Counter[str] = Counter()
        self._num_of_sessions: Counter[str] = Counter()
        self._seen_at: OrderedDict[str, float] = OrderedDict()  # of recent owners, the last seen at the end

    def note(self, owner: str) -> None:
        """A request of this owner has arrived."""
        now = time.monotonic()
        self._seen_at[owner] = now
        self._seen_at.move_to_end(owner)
        while next(iter(self._seen_at.values())) < now - RECENT_S:
            self._seen_at.popitem(last=False)

    def add(self, line: Line, num_branches: int) -> None:
        """Count branches that have got room; negative: that have given it back."""
        owner, has_session = line
        for counter in (self._num_branches, self._num_of_sessions) if has_session else (self._num_branches,):
            counter[owner] += num_branches
            if not counter[owner]:
                del counter[owner]

    def must_wait(self, line: Line, num_branches: int, capacity: int, num_waiting: Mapping[str, int]) -> bool:
        """Whether this many branches more would exceed the owner's share and leave too little room to one that wants no
        more than its own, or are of a session.

        Args:
            capacity: branches that the model's slots may hold together while such owners use them.
            num_waiting: branches that wait for room, by owner.
        """
        owner, has_session = line
        share = capacity // max(1, len(self._seen_at))
        if has_session:
            num_running = self._num_of_sessions.get(owner, 0)
            if num_running and num_running + num_branches > share:
                return True
        has = self._num_branches.get(owner, 0)
        if len(self._seen_at) < 2 or not has or has + num_branches <= share:
            return False
        if self._num_branches.total() + num_branches <= capacity - capacity // HEADROOM_DIVISOR:
            return False
        return any(
            other != owner and self._num_branches.get(other, 0) + num_waiting.get(other, 0) <= share
            for other in self._seen_at
        )
