"""What the gateway's HTTP server needs of the pinned gunicorn. tests/e2e/test_clients.py tests its behaviour."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest
from gunicorn.http import errors
from gunicorn.workers.gthread import ThreadWorker

from gateway.server.http_server import GatewayServer

OVERRIDDEN = {"init_process": (), "load_wsgi": (), "run": (), "handle_exit": ("sig", "frame")}
# Called or read, not overridden.
USED = {
    "handle_request": ("req", "conn"),
    "is_parent_alive": (),
    "notify": (),
}


def parameters(function: object) -> tuple[str, ...]:
    assert callable(function)
    return tuple(inspect.signature(function).parameters)[1:]


def test_gunicorn_is_the_version_that_was_read() -> None:
    """If this fails, read gthread.py, http/parser.py and http/wsgi.py again, then change this line."""
    assert version("gunicorn") == "27.0.1"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_every_overridden_method_exists_with_its_parameters(name: str) -> None:
    assert parameters(getattr(ThreadWorker, name)) == OVERRIDDEN[name]
    assert parameters(getattr(GatewayServer, name)) == OVERRIDDEN[name]


@pytest.mark.parametrize("name", USED)
def test_every_used_method_exists_with_its_parameters(name: str) -> None:
    assert parameters(getattr(ThreadWorker, name)) == USED[name]
    assert getattr(GatewayServer, name) is getattr(ThreadWorker, name)


def test_no_method_overrides_one_of_gunicorn_by_accident() -> None:
    theirs = {name for kind in ThreadWorker.__mro__[:-1] for name in vars(kind) if not name.startswith("__")}
    ours = {name for name in vars(GatewayServer) if not name.startswith("__")}
    assert ours & theirs == set(OVERRIDDEN)


def test_gunicorn_answers_a_request_only_through_what_the_response_socket_has() -> None:
    source = inspect.getsource(ThreadWorker.handle_request)
    assert set(_attributes(source, "conn")) == {"sock", "client", "server"}


def test_a_request_without_its_end_is_an_error_of_the_system() -> None:
    """`GatewayServer` catches it before `OSError`."""
    assert issubclass(errors.NoMoreData, OSError)
    assert issubclass(errors.LimitRequestLine, errors.ParseException)
    assert issubclass(errors.LimitRequestHeaders, errors.ParseException)


def _attributes(source: str, name: str) -> list[str]:
    return [part.split(".")[1].split(",")[0].split(")")[0] for part in source.split() if part.startswith(f"{name}.")]
