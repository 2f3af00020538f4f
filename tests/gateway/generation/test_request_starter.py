"""The quota of concurrent requests per owner, and a newer request of a session, which cancels the older."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress

import pytest

from gateway.generation.request import RequestContext
from gateway.generation.request_starter import OwnerQuota, RequestStarter, Sessions
from gateway.generation.selection import selection_policy
from shared.cancellation import HangupWatcher
from shared.errors import QuotaExceeded, Superseded
from tests.gateway.generation.stubs import MakePool, hang, make_spec


def test_an_owner_at_its_limit_is_refused_with_retry_after_until_a_request_ends() -> None:
    quota = OwnerQuota(2)
    with quota.entering("a"):
        with quota.entering("a"):
            with pytest.raises(QuotaExceeded, match="TERCET_KEY_CONCURRENCY") as caught, quota.entering("a"):
                pass
            with quota.entering("b"):
                pass
        with quota.entering("a"):
            pass
    assert caught.value.status == 429
    assert "Retry-After" in caught.value.headers


@pytest.mark.parametrize(("default", "own"), [(0, None), (1, 0)])
def test_without_a_limit_none_is_refused(default: int, own: int | None) -> None:
    quota = OwnerQuota(default)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(quota.entering("a", own))


def test_the_limit_holds_with_many_threads() -> None:
    quota = OwnerQuota(3)
    room = threading.Semaphore(3)

    def request(_: int) -> bool:
        with suppress(QuotaExceeded), quota.entering("a"):
            assert room.acquire(blocking=False)
            room.release()
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        assert any(list(pool.map(request, range(2000))))
    with quota.entering("a"), quota.entering("a"), quota.entering("a"):
        pass


@pytest.mark.parametrize(("first", "second", "is_late"), [(0, 0, False), (2, 3, False), (2, 0, False), (2, 1, True)])
def test_the_newer_of_two_requests_of_a_session_cancels_the_older_and_a_late_one_is_refused(
    first: int, second: int, is_late: bool
) -> None:
    """A browser sends both within milliseconds, on two connections. One without a number is the newest."""
    sessions = Sessions()
    older, newer, newest = (RequestContext(make_spec(session="s", sequence=number)) for number in (first, second, 4))
    with ExitStack() as stack:
        stack.enter_context(sessions.superseding(older))
        assert older.cancel_reason is None
        with pytest.raises(Superseded) if is_late else nullcontext():
            stack.enter_context(sessions.superseding(newer))
        assert isinstance(older.cancel_reason, Superseded) == older.is_over == (not is_late)
        stack.enter_context(sessions.superseding(newest))
        superseded = (older if is_late else newer).cancel_reason
        assert isinstance(superseded, Superseded)
        assert (superseded.status, superseded.headers["x-should-retry"]) == (409, "false")
        assert newest.cancel_reason is None


def test_the_end_of_the_older_request_leaves_the_newer_registered() -> None:
    sessions = Sessions()
    older, newer, newest = (RequestContext(make_spec(session="s")) for _ in range(3))
    with sessions.superseding(newest):
        pass
    outer = sessions.superseding(older)
    outer.__enter__()
    with sessions.superseding(newer):
        outer.__exit__(None, None, None)
        with sessions.superseding(newest):
            assert isinstance(newer.cancel_reason, Superseded)


def test_requests_of_different_sessions_or_none_cancel_nothing() -> None:
    sessions = Sessions()
    contexts = [RequestContext(make_spec(session=session)) for session in ("a", "b", None, None)]
    a, b, c, d = contexts
    with sessions.superseding(a), sessions.superseding(b), sessions.superseding(c), sessions.superseding(d):
        assert not any(context.is_over for context in contexts)


def test_jobs_are_no_requests_that_clients_await(make_pool: MakePool) -> None:
    pool = make_pool(hang)
    starter = RequestStarter(pool.admission.models, pool.fanout, HangupWatcher(), 0, 30.0)
    policy = selection_policy(make_spec(), similarity=0.9)
    for is_job in (True, False):
        with starter.started(make_spec(is_job=is_job), policy):
            assert pool.fanout.num_awaited == (not is_job)
    assert pool.fanout.num_awaited == 0
