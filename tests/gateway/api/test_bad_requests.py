"""Bad requests against the app in this process, with stub workers: each gets a correct refusal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, event, given, settings

from shared.cancellation import HangupWatcher
from shared.protocol import GenerateRequest
from tests.bad_requests import HttpRequest, bad_requests, call_app, check_answer
from tests.gateway.api.conftest import Api
from tests.gateway.generation.stubs import Step, StubPool, completion


def respond(request: GenerateRequest) -> Iterator[Step]:
    yield from completion(request, f" the sea was calm on day {request.seed % 1000}.")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, hangups: HangupWatcher) -> Iterator[Api]:
    pool = StubPool(tmp_path_factory.mktemp("t"), respond, max_batch=48)
    yield Api(pool, hangups)
    pool.close()


def test_no_bad_request_gets_another_answer_than_a_refusal(api: Api) -> None:
    statuses: Counter[int] = Counter()

    @settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large])
    @given(bad_requests())
    def answer(request: HttpRequest) -> None:
        status, headers, body = call_app(api.app, request)
        statuses[status] += 1
        event(str(status))
        check_answer(request, status, headers, body)

    answer()
    if settings.get_current_profile_name() == "full":
        assert {200, 400, 404, 405, 422} <= statuses.keys(), statuses
    api.pool.wait_until_idle()
    assert api.complete().status_code == 200
