"""Deficit round robin: order within an owner, equal shares between owners, no owner ever starves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.waiting.fair_queue import FairQueue

MAX_BRANCHES = 8


@dataclass(eq=False)
class Request:
    owner: str
    cost: int
    is_latest_first: bool = False


def serve_all(queue: FairQueue[Request]) -> list[Request]:
    served = []
    while (head := queue.head()) is not None:
        queue.serve(head)
        served.append(head)
    return served


def test_shares_are_equal_in_branches_whatever_the_size_of_requests() -> None:
    queue = FairQueue[Request]()
    for _ in range(80):
        queue.append(Request("small", 1))
    for _ in range(10):
        queue.append(Request("large", 8))
    served: Counter[str] = Counter()
    for request in serve_all(queue):
        served[request.owner] += request.cost
        if served["small"] < 80 and served["large"] < 80:
            assert abs(served["small"] - served["large"]) <= 8


def test_the_latest_of_requests_that_become_useless_is_first_and_holds_up_no_other() -> None:
    queue = FairQueue[Request]()
    latest_first = [Request("a", 1, is_latest_first=True) for _ in range(3)]
    first_come = [Request("a", 1) for _ in range(3)]
    for pair in zip(latest_first, first_come, strict=True):
        for request in pair:
            queue.append(request)
    served = serve_all(queue)
    assert [request for request in served if request.is_latest_first] == latest_first[::-1]
    assert [request for request in served if not request.is_latest_first] == first_come
    assert {request.is_latest_first for request in served[:2]} == {True, False}


def test_an_owner_of_both_kinds_gets_no_more_than_another() -> None:
    queue = FairQueue[Request]()
    for number in range(60):
        queue.append(Request("both", 3, is_latest_first=number % 2 == 0))
        queue.append(Request("one", 3))
    served = Counter(request.owner for request in serve_all(queue)[:60])
    assert abs(served["both"] - served["one"]) <= 2


class Fairness(RuleBasedStateMachine):
    """While two owners both wait, neither gets more than two of the largest requests more than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue[Request]()
        self.waiting: dict[str, list[Request]] = {}
        # Branches served to the first owner of each pair less those to the second, since both wait: the highest and
        # lowest values of it, and the last.
        self.leads: dict[tuple[str, str], list[int]] = {}

    @rule(owner=st.sampled_from("abc"), num_branches=st.integers(1, MAX_BRANCHES))
    def append(self, owner: str, num_branches: int) -> None:
        request = Request(owner, num_branches)
        self.queue.append(request)
        self.waiting.setdefault(owner, []).append(request)
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
        request = data.draw(st.sampled_from(self.waiting[owner]))
        self.queue.remove(request)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        requests = self.waiting[request.owner]
        requests.remove(request)
        if not requests:
            del self.waiting[request.owner]
            self.leads = {pair: lead for pair, lead in self.leads.items() if request.owner not in pair}

    @invariant()
    def the_head_is_its_owners_first(self) -> None:
        head = self.queue.head()
        assert (head is None) == (not self.waiting)
        assert head is None or self.waiting[head.owner][0] is head
        for owner in "abc":
            assert self.queue.last(owner) == self.waiting.get(owner, [])[-1:]

    @invariant()
    def no_pair_drifts_apart(self) -> None:
        assert all(highest - lowest <= 2 * MAX_BRANCHES for highest, lowest, _ in self.leads.values())


TestFairness = Fairness.TestCase
TestFairness.settings = settings(stateful_step_count=40)
