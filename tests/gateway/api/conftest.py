"""The app over stub workers, called in-process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from falcon import testing

from gateway.app import create_app
from gateway.jobs.executor import JobExecutor
from shared.cancellation import HangupWatcher
from shared.protocol import GenerateRequest, TokenizeResponse
from shared.settings import Settings
from tests.gateway.generation.stubs import MakePool, Respond, Step, StubPool, completion


class Api:
    """The gateway's app in front of a pool of stub workers."""

    def __init__(
        self, pool: StubPool, hangups: HangupWatcher, jobs: JobExecutor | None = None, **settings: str
    ) -> None:
        self.pool = pool
        loaded = Settings.load({f"TERCET_{name.upper()}": value for name, value in settings.items()})
        self.app = create_app(
            settings=loaded,
            admission=pool.admission,
            fanout=pool.fanout,
            metrics=pool.metrics,
            hangups=hangups,
            jobs=jobs,
            clients=pool.clients,
        )
        self._client = testing.TestClient(self.app, headers={"Host": "localhost"})

    def post(self, path: str, body: Any = None, **options: Any) -> testing.Result:
        """POST a JSON body."""
        return self._client.simulate_post(path, json=body, **options)

    def request(self, method: str, path: str, **options: Any) -> testing.Result:
        return self._client.simulate_request(method, path, **options)

    def complete(self, **fields: Any) -> testing.Result:
        """POST to `/autocomplete`; a context is filled in."""
        return self.post("/autocomplete", {"context": "He saw", **fields})

    def complete_as(self, key: str, **fields: Any) -> testing.Result:
        """As `complete`, with the name of an API key in a header that `test_refusals.Keys` reads."""
        return self.post("/autocomplete", {"context": "He saw", **fields}, headers={"X-Key": key})


MakeApi = Callable[..., Api]


@pytest.fixture
def make_api(make_pool: MakePool, hangups: HangupWatcher) -> MakeApi:
    """Makes an app in front of a stub worker for each responder. `settings` are `TERCET_` variables in lower case."""

    def make(
        *responders: Respond,
        settings: dict[str, str] | None = None,
        jobs: JobExecutor | None = None,
        **options: Any,
    ) -> Api:
        return Api(make_pool(*responders, **options), hangups, jobs, **(settings or {}))

    return make


def respond(request: GenerateRequest) -> Iterator[Step]:
    """Completions differ, and those of lower seeds are likelier."""
    yield from completion(request, f" the sea {request.seed % 100}", logprob=-1.0 - request.seed % 100)


def tokenize(text: str) -> TokenizeResponse:
    """A token for each character."""
    return TokenizeResponse(ids=[1] * len(text), texts=[*text], ends=[*range(1, len(text) + 1)], n_ctx=1024, eos_id=0)


@pytest.fixture
def api(make_api: MakeApi) -> Api:
    return make_api(respond, tokenize=tokenize, max_batch=16, settings={"hosts": "*", "max_body_bytes": "300000"})


@pytest.fixture
def sagemaker(api: Api, hangups: HangupWatcher) -> Api:
    """A SageMaker container's app in front of the same pool."""
    return Api(api.pool, hangups, hosts="*", sagemaker="1")
