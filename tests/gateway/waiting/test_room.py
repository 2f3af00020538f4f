"""A waiting room: each request is settled once, none waits beyond the bound, who has most gives way, and no owner of a
queue ever starves (deficit round robin)."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.waiting.room import FIRST_COME, LATEST_FIRST, FairQueue, Waiter, WaitingRoom
from shared.errors import ClientGone, Overloaded

BOUND = 20
MAX_BRANCHES = 8
KINDS = st.sampled_from([FIRST_COME, LATEST_FIRST])


class Request(Waiter, eq=False, kw_only=True):
    num_wakes: int = 0

    def wake(self) -> None:
        self.num_wakes += 1


def request(owner: str, size: int = 1, **fields: object) -> Request:
    return Request(owner=owner, size=size, cost=size, deadline=0.0, **fields)  # type: ignore[arg-type]


def test_the_request_that_would_be_served_last_is_refused() -> None:
    room = WaitingRoom[Request](2)
    first_come = [request("a") for _ in range(3)]
    latest_first = [request("b", kind=LATEST_FIRST) for _ in range(3)]
    for kind in (first_come, latest_first):
        for waiting in kind:
            room.enter(waiting)
        refused = room.refuse_one(lambda: Overloaded("full"))
        assert refused is (first_come[-1] if kind is first_come else latest_first[0])
        for waiting in kind:
            if waiting.is_waiting:
                room.settle(waiting, ClientGone("gone"))


class History(RuleBasedStateMachine):
    """Requests of three owners in two queues, some of them urgent, against a list of those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.room = WaitingRoom[Request](BOUND)
        self.waiting: list[Request] = []
        self.settled: list[Request] = []

    @rule(
        owner=st.sampled_from("abc"),
        queue=st.sampled_from("qr"),
        size=st.integers(1, 8),
        kind=KINDS,
        is_urgent=st.booleans(),
        since=st.sampled_from([0.0, math.inf]),
    )
    def enter(self, owner: str, queue: str, size: int, kind: int, is_urgent: bool, since: float) -> None:
        new = request(owner, size, queue=queue, kind=kind, is_urgent=is_urgent, since=since)
        self.room.enter(new)
        self.waiting.append(new)
        while (refused := self.room.refuse_one(lambda: Overloaded("full"))) is not None:
            before = Counter[str]()
            for waiting in self.waiting:
                before[waiting.owner] += 0 if waiting.is_urgent else waiting.size
            assert before.total() > BOUND
            assert before[refused.owner] == max(before.values())
            assert isinstance(refused.error, Overloaded)
            self._leave(refused)

    @precondition(lambda self: self.waiting)
    @rule(queue=st.sampled_from("qr"))
    def serve(self, queue: str) -> None:
        head = self.room.head(queue)
        ordinary = [waiting for waiting in self.waiting if waiting.queue == queue and not waiting.is_urgent]
        assert (head is None) == (not ordinary)
        if head is None:
            return
        line = [waiting for waiting in ordinary if waiting.line == head.line]
        assert head is line[-1 if head.kind == LATEST_FIRST else 0]
        assert head.kind != LATEST_FIRST or line[0].since, "one that has waited for long is overtaken without end"
        self.room.settle(head)
        assert head.error is None
        self._leave(head)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.room.settle(request, ClientGone("gone"))
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self.waiting.remove(request)
        self.settled.append(request)

    @invariant()
    def the_room_counts_what_waits(self) -> None:
        sizes = Counter[str]()
        for waiting in self.waiting:
            sizes[waiting.owner] += 0 if waiting.is_urgent else waiting.size
        assert self.room.sizes == +sizes
        assert self.room.size <= BOUND
        assert list(self.room.urgent) == [waiting for waiting in self.waiting if waiting.is_urgent]

    @invariant()
    def each_is_settled_once(self) -> None:
        assert all((waiting.is_waiting, waiting.num_wakes) == (True, 0) for waiting in self.waiting)
        assert all((settled.is_waiting, settled.num_wakes) == (False, 1) for settled in self.settled)


TestHistory = History.TestCase
TestHistory.settings = settings(stateful_step_count=40)


def test_the_lines_of_an_owner_take_turns_and_one_that_begins_again_and_again_gets_it_no_more() -> None:
    queue = FairQueue[Request]()
    for owner in 40 * "ab":
        queue.append(request(owner))
    served = Counter[tuple[str, int]]()
    for _ in range(40):
        if len(queue.last("a")) == 1:
            queue.append(request("a", kind=LATEST_FIRST))
        head = queue.head()
        assert head is not None
        queue.serve(head)
        served[head.line] += 1
    assert served == {("b", FIRST_COME): 20, ("a", FIRST_COME): 10, ("a", LATEST_FIRST): 10}


class Fairness(RuleBasedStateMachine):
    """While two owners both wait, neither gets more than two of the largest requests more than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue[Request]()
        self.waiting: dict[str, list[Request]] = {}
        # Branches served to the first owner of each pair less those to the second, since both wait: the highest and
        # lowest values of it, and the last.
        self.leads: dict[tuple[str, str], list[int]] = {}

    @rule(owner=st.sampled_from("abc"), num_branches=st.integers(1, MAX_BRANCHES), kind=KINDS)
    def append(self, owner: str, num_branches: int, kind: int) -> None:
        new = request(owner, num_branches, kind=kind)
        self.queue.append(new)
        self.waiting.setdefault(owner, []).append(new)
        for other in self.waiting:
            if other != owner:
                self.leads.setdefault((min(owner, other), max(owner, other)), [0, 0, 0])

    @precondition(lambda self: self.waiting)
    @rule()
    def serve(self) -> None:
        head = self.queue.head()
        assert head is not None
        self.queue.serve(head)
        for pair, lead in self.leads.items():
            if head.owner in pair:
                lead[2] += head.cost * (1 if head.owner == pair[0] else -1)
                lead[:2] = [max(lead[0], lead[2]), min(lead[1], lead[2])]
        self._leave(head)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.waiting)))
        cancelled = data.draw(st.sampled_from(self.waiting[owner]))
        self.queue.remove(cancelled)
        self._leave(cancelled)

    def _leave(self, left: Request) -> None:
        requests = self.waiting[left.owner]
        requests.remove(left)
        if not requests:
            del self.waiting[left.owner]
            self.leads = {pair: lead for pair, lead in self.leads.items() if left.owner not in pair}

    @invariant()
    def no_pair_drifts_apart(self) -> None:
        assert all(highest - lowest <= 2 * MAX_BRANCHES for highest, lowest, _ in self.leads.values())


TestFairness = Fairness.TestCase
TestFairness.settings = settings(stateful_step_count=40)
