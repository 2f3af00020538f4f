"""Admission in random histories of several owners, models and slots: what always holds."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.pool.placement import Claim
from shared.errors import ClientGone, Overloaded
from tests.e2e.harness import until
from tests.gateway.pool.reservations import Waiting, claim, make

MAX_BATCH = 3
QUEUE_BOUND = 9
SLOTS = {"small": [0, 1], "medium": [2]}
OWNERS = "abc"


@dataclass(eq=False)
class Request:
    claim: Claim
    num_branches: int
    reservation: Waiting

    @property
    def result(self) -> Future[list[int]]:
        return self.reservation.future


class AdmissionHistory(RuleBasedStateMachine):
    """Each request waits in a thread of its own. After each step, the requests that wait are those of the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = make([("small", 2), ("medium", 1)], max_batch=MAX_BATCH, queue=QUEUE_BOUND)
        self.pool = ThreadPoolExecutor(QUEUE_BOUND + MAX_BATCH)  # more than can wait
        self.waiting: list[Request] = []
        self.running: list[tuple[int, Claim]] = []  # the slot of each branch in flight

    def teardown(self) -> None:
        for request in self.waiting:
            request.reservation.cancel()
        self.pool.shutdown()

    @rule(owner=st.sampled_from(OWNERS), model=st.sampled_from(list(SLOTS)), num_branches=st.integers(1, MAX_BATCH))
    def arrive(self, owner: str, model: str, num_branches: int) -> None:
        own = claim(model, timeout_s=10, owner=owner)
        self.waiting.append(Request(own, num_branches, Waiting(self.pool, self.admission, own, num_branches)))
        num_offered = self._branches_by_owner(self.waiting).total()
        refused = [request for request in self._settled() if isinstance(request.result.exception(), Overloaded)]
        waiting = self._branches_by_owner(self.waiting)
        for refused_owner, num_refused in self._branches_by_owner(refused).items():
            # The queue was full, and this owner had the most branches in it.
            assert num_offered > QUEUE_BOUND
            others = [waiting[other] for other in OWNERS if other != refused_owner]
            assert waiting[refused_owner] + num_refused >= max(others)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        branch = data.draw(st.sampled_from(self.running))
        self.running.remove(branch)
        self.admission.release(*branch)
        assert not any(request.result.exception() for request in self._settled())

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        request.reservation.cancel()
        self._settled()
        assert isinstance(request.result.exception(), ClientGone)

    def _settled(self) -> list[Request]:
        """The requests that wait no longer, once their threads know it."""

        def num_waiting() -> int:
            return sum(request.num_branches for request in self.waiting if not request.result.done())

        until(lambda: num_waiting() == self.admission.num_waiting, 5, "the requests that wait")
        settled = [request for request in self.waiting if request.result.done()]
        self.waiting = [request for request in self.waiting if not request.result.done()]
        for request in settled:
            if request.result.exception() is None:
                slots = request.result.result()
                assert len(slots) == request.num_branches
                assert set(slots) <= set(SLOTS[request.claim.model])
                self.running += [(slot, request.claim) for slot in slots]
        return settled

    def _branches_by_owner(self, requests: list[Request]) -> Counter[str]:
        branches = Counter[str]()
        for request in requests:
            branches[request.claim.owner] += request.num_branches
        return branches

    @invariant()
    def no_slot_has_more_than_its_batch(self) -> None:
        running = Counter(slot for slot, _ in self.running)
        assert self.admission.in_flight() == [running[index] for index in range(3)]
        assert max(self.admission.in_flight()) <= MAX_BATCH

    @invariant()
    def the_queue_keeps_its_bound(self) -> None:
        assert self.admission.num_waiting <= QUEUE_BOUND

    @invariant()
    def none_waits_for_an_idle_slot(self) -> None:
        idle = [index for index, in_flight in enumerate(self.admission.in_flight()) if not in_flight]
        for request in self.waiting:
            assert not set(idle) & set(SLOTS[request.claim.model])


TestAdmissionHistory = AdmissionHistory.TestCase
TestAdmissionHistory.settings = settings(stateful_step_count=40)
