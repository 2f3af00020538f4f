"""The part of a model's room that one owner (API key) may fill while others use the model too.

A request that waits for room waits for sequences to end, not for its turn: where one owner fills all slots with long
prompts, the next request of another waits for a whole generation, however fair the queue is. So an owner beyond its
equal share of the room leaves some free. No lock: `Admission` holds its own.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict

# An owner beyond its share leaves an eighth of the room to others. Of the default batch it is six branches, two
# requests of three: one for a request that comes, and one for the next, before a sequence of the first has ended.
HEADROOM_DIVISOR = 8
# Who has sent no request for this long does not count. An editor sends one at least every few seconds.
RECENT_S = 10.0


class OwnerShares:
    """Branches in flight of each owner, in the slots of one model."""

    def __init__(self) -> None:
        self._num_branches: Counter[str] = Counter()
        self._seen_at: OrderedDict[str, float] = OrderedDict()  # of recent owners, the last seen at the end

    def note(self, owner: str) -> None:
        """A request of this owner has arrived."""
        now = time.monotonic()
        self._seen_at[owner] = now
        self._seen_at.move_to_end(owner)
        while next(iter(self._seen_at.values())) < now - RECENT_S:
            self._seen_at.popitem(last=False)

    def add(self, owner: str, num_branches: int) -> None:
        """Count branches that have got room."""
        self._num_branches[owner] += num_branches

    def remove(self, owner: str) -> None:
        """A branch has given its room back."""
        self._num_branches[owner] -= 1
        if self._num_branches[owner] <= 0:
            del self._num_branches[owner]

    def must_wait(self, owner: str, num_branches: int, capacity: int, num_free: int) -> bool:
        """Whether this many branches more would exceed the owner's share and leave too little room to others.

        Args:
            capacity: branches that the model's slots hold together; `num_free`: those of them that have room now.
        """
        num_owners = len(self._seen_at)
        has = self._num_branches.get(owner, 0)
        if num_owners < 2 or not has:
            return False
        return has + num_branches > capacity // num_owners and num_free - num_branches < capacity // HEADROOM_DIVISOR
