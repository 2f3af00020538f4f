"""The quota of concurrent requests per owner."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from gateway.pool.quota import OwnerQuota
from shared.errors import QuotaExceeded


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


@pytest.mark.parametrize(("owner", "default", "own"), [("", 1, None), ("a", 0, None), ("a", 1, 0)])
def test_without_an_owner_or_a_limit_none_is_refused(owner: str, default: int, own: int | None) -> None:
    quota = OwnerQuota(default)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(quota.entering(owner, own))


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
