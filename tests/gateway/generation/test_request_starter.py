"""The quota of concurrent requests per owner, and a newer request of a session, which cancels the older."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from gateway.generation.request import RequestContext
from gateway.generation.request_starter import OwnerQuota, Sessions
from shared.errors import QuotaExceeded, Superseded
from tests.gateway.generation.stubs import make_spec


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


def test_a_newer_request_of_a_session_cancels_the_older() -> None:
    sessions = Sessions()
    older, newer, newest = (RequestContext(make_spec(session="s")) for _ in range(3))
    with sessions.superseding(older):
        assert older.cancel_reason is None
        with sessions.superseding(newer):
            assert isinstance(older.cancel_reason, Superseded)
            assert older.is_over
        assert newer.cancel_reason is None
        with sessions.superseding(newest):
            assert newer.cancel_reason is None  # its block had ended


def test_a_request_that_arrives_after_a_newer_one_is_refused() -> None:
    """A browser sends both within milliseconds, on two connections."""
    sessions = Sessions()
    newer, late, newest = (RequestContext(make_spec(session="s", sequence=number)) for number in (2, 1, 3))
    with sessions.superseding(newer):
        with pytest.raises(Superseded), sessions.superseding(late):
            pass
        assert newer.cancel_reason is None
        with sessions.superseding(newest):
            assert isinstance(newer.cancel_reason, Superseded)
            assert newest.cancel_reason is None


def test_a_request_without_a_number_is_the_newest_when_it_arrives() -> None:
    sessions = Sessions()
    numbered, unnumbered = (RequestContext(make_spec(session="s", sequence=number)) for number in (2, 0))
    with sessions.superseding(numbered), sessions.superseding(unnumbered):
        assert isinstance(numbered.cancel_reason, Superseded)
        assert unnumbered.cancel_reason is None


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
