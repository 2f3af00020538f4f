"""What the gateway's HTTP server needs of the pinned gunicorn. tests/e2e/test_clients.py tests its behaviour."""

from __future__ import annotations

from importlib.metadata import version

from gunicorn.workers.gthread import ThreadWorker

from gateway.server.http_server import GatewayServer

OVERRIDDEN = {"init_process", "load_wsgi", "run", "handle_exit"}


def test_gunicorn_is_the_version_that_was_read() -> None:
    """If this fails, read gthread.py, http/parser.py and http/wsgi.py again, then change this line."""
    assert version("gunicorn") == "27.0.1"


def test_no_method_overrides_one_of_gunicorn_by_accident() -> None:
    theirs = {name for kind in ThreadWorker.__mro__[:-1] for name in vars(kind) if not name.startswith("__")}
    ours = {name for name in vars(GatewayServer) if not name.startswith("__")}
    assert ours & theirs == OVERRIDDEN
