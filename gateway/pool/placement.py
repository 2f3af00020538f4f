"""Placement: which slots the branches of a request go to, and how much of them an owner may fill. Knows neither locks
nor HTTP; `Admission` holds its own lock around every call.

A slot's load is its branches in flight times its measured time per token. A slot that is twice as slow has the same
load with half the work, so unequal GPUs get unequal shares.

Three policies; the figures are times of GPT-2 small's linear layers on two cores of an AMD EPYC:

`pack`    All branches on one slot. The prompt is computed once instead of three times (int8, 64 tokens: 23.7 ms
          each), and a decode step of three rows costs little more than of one (int8: 3.2 ms against 3.0 ms).
`spread`  Each branch on a slot of its own. Three branches finish in the time of one where each slot has a device of
          its own and rows are not nearly free (fp32: 87 ms for three, 33.9 ms for one).
`auto`    `pack` while a slot has room for all branches, else `spread`. Waiting for a slot with room could take a whole
          generation (20 steps of 3.2 ms), to save the prefill of two prompts (2 × 23.7 ms), while other slots have
          room unused.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from gateway.pool.slot_table import Entry
from shared.setting_values import Placement

# Document affinity holds while the load of the slot with the cached prompt is at most this multiple of the lowest.
MAX_AFFINITY_LOAD_RATIO = 2.0
# Documents remembered before the least recently used is dropped. A dropped one may be placed on another slot, which
# then computes its prompt once more.
MAX_DOCUMENTS = 10_000
# An owner beyond its share leaves an eighth of the room to others. Of the default batch it is six branches, two
# requests of three: one for a request that comes, and one for the next, before a sequence of the first has ended.
HEADROOM_DIVISOR = 8
# Who has sent no request for this long does not count. An editor sends one at least every few seconds.
RECENT_S = 10.0


class Claim(msgspec.Struct, eq=False, kw_only=True):
    """What a request says of itself where it reserves room, and the weights that its branches share.

    Its first reservation fixes `revision`. It is free again when no branch runs and none has given output: the request
    can then start again with other weights. `Admission` alone writes `revision` and `num_running`, under its lock.

    Attributes:
        deadline: `time.monotonic()` time.
        owner: id of the request's API key; the queue is fair between owners.
        document: a number that requests for the same document share (document affinity): they go to the slot that has
            the prompt in its prefix cache.
        has_session: the client's next key makes the request useless. So the latest goes first, for a while, and no more
            run than end before it: the owner's sessions keep to its share of the room, or to one request.
        is_long_text: it is only to be tokenized; one of these has a slot at a time.
        revision: value of `State.revision`. None if it is not fixed yet.
        num_running: branches that hold room in a slot.
        has_output: a branch has given text or a result, so that the revision is final.
    """

    model: str
    deadline: float
    owner: str = ""
    document: int | None = None
    has_session: bool = False
    is_long_text: bool = False
    revision: str | None = None
    num_running: int = 0
    has_output: bool = False

    @property
    def line(self) -> tuple[str, bool]:
        return self.owner, self.has_session


class DocumentAffinity:
    """Which slot served a document last, and so has its prompt in the prefix cache: a map with least-recently-used
    eviction. A document is a number that the caller derives."""

    def __init__(self, max_documents: int = MAX_DOCUMENTS) -> None:
        self._max_documents = max_documents
        self._slots: OrderedDict[int, int] = OrderedDict()

    def slot_of(self, document: int | None) -> int | None:
        return None if document is None else self._slots.get(document)

    def remember(self, document: int | None, slot: int) -> None:
        """Note that a slot serves this document. `None`, a request without a document, is ignored."""
        if document is None:
            return
        self._slots[document] = slot
        self._slots.move_to_end(document)
        if len(self._slots) > self._max_documents:
            self._slots.popitem(last=False)


def place(
    slots: Sequence[Entry],
    num_branches: int,
    policy: Placement,
    avoid: Collection[int] = (),
    cached_on: int | None = None,
) -> list[int] | None:
    """Slot indices in branch order, or None while the branches do not fit together.

    Args:
        slots: the warm slots of the requested model.
        avoid: slots that have just failed this request; used only if there is no other.
        cached_on: the slot with this document's last prompt in its prefix cache; used unless it is busy. Only for
            branches that share a slot.
    """
    slots = [slot for slot in slots if slot.index not in avoid] or slots
    if policy != "spread":
        index = _shared_slot(slots, num_branches, cached_on)
        if index is not None:
            return [index] * num_branches
        if policy == "pack":
            return None
    return _spread(slots, num_branches)


def place_on_one_revision(
    groups: Sequence[Sequence[Entry]],
    num_branches: int,
    policy: Placement,
    avoid: Collection[int] = (),
    cached_on: int | None = None,
) -> list[int] | None:
    """Slots for as many branches as fit together, all from one group; None while there is no room for them.

    Of several groups it takes the one that holds more branches together, then the one with the lowest load.

    Args:
        groups: the warm slots of the requested model, those with the same weights in one group.
        avoid, cached_on: as in `place`.

    Returns:
        Slot indices, fewer than `num_branches` if even the idle slots of the group hold fewer.
    """
    placed: list[tuple[int, float, list[int]]] = []
    for slots in groups:
        wave = min(num_branches, largest_wave(slots, policy))
        chosen = place(slots, wave, policy, avoid, cached_on)
        if chosen is not None:
            load = max((slot.load(chosen.count(slot.index)) for slot in slots if slot.index in chosen), default=0.0)
            placed.append((-len(chosen), load, chosen))
    return min(placed)[2] if placed else None


def _shared_slot(slots: Sequence[Entry], num_branches: int, cached_on: int | None) -> int | None:
    """The slot for all branches: the one with the cached prompt unless it is busy, else the least loaded."""
    candidates = [slot for slot in slots if slot.room() >= num_branches]
    if not candidates:
        return None
    best = min(candidates, key=lambda slot: (slot.load(num_branches), slot.index))
    max_load = MAX_AFFINITY_LOAD_RATIO * best.load(num_branches)
    if any(slot.index == cached_on and slot.load(num_branches) <= max_load for slot in candidates):
        return cached_on
    return best.index


def _spread(slots: Sequence[Entry], num_branches: int) -> list[int] | None:
    """A slot for each branch: as few branches per slot as possible, the least loaded slots first."""
    taken = {slot.index: 0 for slot in slots}
    chosen: list[int] = []
    for _ in range(num_branches):
        candidates = [slot for slot in slots if slot.room(taken[slot.index]) > 0]
        if not candidates:
            return None
        best = min(candidates, key=lambda slot: (taken[slot.index], slot.load(taken[slot.index] + 1), slot.index))
        taken[best.index] += 1
        chosen.append(best.index)
    return chosen


def largest_wave(slots: Sequence[Entry], policy: Placement) -> int:
    """How many branches can be placed together at most on these slots when they are idle."""
    sizes = [slot.max_batch for slot in slots]
    return max(sizes, default=0) if policy == "pack" else sum(sizes)


class OwnerShares:
    """The part of a model's room that one owner (API key) may fill while others use it too: branches in flight of each
    owner, and how many of them are of sessions.

    A request that waits for room waits for sequences to end, not for its turn: where one owner fills all slots with
    long prompts, the next request of another waits for a whole generation, however fair the queue is. And on a CPU each
    sequence makes the steps of all others longer. So an owner beyond its equal share of the room leaves some free for
    those that want no more than theirs. Where all want more, they fill the room together: none of them would be
    answered sooner.

    Requests of sessions keep to their owner's share in any case. An engine that decodes those of all sessions together
    slows each of them down until none ends before the next key, which supersedes it.
    """

    def __init__(self) -> None:
        self._num_branches: defaultdict[str, int] = defaultdict(int)
        self._num_of_sessions: defaultdict[str, int] = defaultdict(int)
        self._seen_at: OrderedDict[str, float] = OrderedDict()  # of recent owners, the last seen at the end

    def note(self, owner: str) -> None:
        """A request of this owner has arrived."""
        now = time.monotonic()
        self._seen_at[owner] = now
        self._seen_at.move_to_end(owner)
        while next(iter(self._seen_at.values())) < now - RECENT_S:
            self._seen_at.popitem(last=False)

    def add(self, line: tuple[str, bool], num_branches: int) -> None:
        """Count branches that have got room; negative: that have given it back."""
        owner, has_session = line
        for counter in (self._num_branches, self._num_of_sessions) if has_session else (self._num_branches,):
            counter[owner] += num_branches
            if not counter[owner]:
                del counter[owner]

    def must_wait(
        self, line: tuple[str, bool], num_branches: int, capacity: Callable[[], int], num_waiting: Mapping[str, int]
    ) -> bool:
        """Whether this many branches more would exceed the owner's share and leave too little room to one that wants no
        more than its own, or are of a session.

        Args:
            capacity: counts the branches that the model's slots may hold together while such owners use them. 0: there
                is no slot, so the request need not wait for its owner's others.
            num_waiting: branches that wait for room, by owner.
        """
        owner, has_session = line
        num_of_sessions = self._num_of_sessions.get(owner, 0) if has_session else 0
        num_running = self._num_branches.get(owner, 0) if len(self._seen_at) > 1 else 0
        if not (num_of_sessions or num_running) or not (num_shared := capacity()):
            return False
        share = num_shared // max(1, len(self._seen_at))
        if num_of_sessions and num_of_sessions + num_branches > share:
            return True
        if not num_running or num_running + num_branches <= share:
            return False
        leaves_room = sum(self._num_branches.values()) + num_branches <= num_shared - num_shared // HEADROOM_DIVISOR
        return not leaves_room and any(
            other != owner and self._num_branches.get(other, 0) + num_waiting.get(other, 0) <= share
            for other in self._seen_at
        )
