"""Routes that answer without workers, for tests of what the middleware does around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import falcon
import pytest

from tests.gateway.conftest import Gateway, MakeGateway


class Echo:
    """Answers a body with its length, and adds to the request's timing and log line."""

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.media = {}

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.media = {"length": len(req.bounded_stream.read())}
        req.context.timing = {"queue": 1.5, "decode": 20.0}
        req.context.log = {"model": "small"}


class Stream:
    """A streamed body; `is_closed` is set when the server closes it."""

    is_closed = False

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        req.bounded_stream.read()
        req.context.log = {"model": "small"}
        resp.stream = self

    def __iter__(self) -> Iterator[bytes]:
        yield b"one"
        yield b"two"

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def make_echo(make_gateway: MakeGateway) -> Callable[..., Gateway]:
    """Makes a gateway from settings, with the routes `/echo` and `/stream`."""

    def make(**settings: str) -> Gateway:
        gateway = make_gateway(**settings)
        gateway.app.add_route("/echo", Echo())
        gateway.app.add_route("/stream", Stream())
        return gateway

    return make


@pytest.fixture
def echo(make_echo: Callable[..., Gateway]) -> Gateway:
    """A gateway with default settings and the routes `/echo` and `/stream`."""
    return make_echo()
