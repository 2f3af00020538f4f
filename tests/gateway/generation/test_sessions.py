"""A newer request of a session cancels the older."""

import pytest

from gateway.generation.request import RequestContext
from gateway.generation.sessions import Sessions
from shared.errors import Superseded
from tests.gateway.generation.stubs import make_spec


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
