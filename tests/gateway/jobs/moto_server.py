"""moto's server of DynamoDB, one request at a time: `moto_server.py PORT`.

moto's own server runs each request in a thread, and its transactions are not atomic among them: it checks the
conditions, writes, and undoes a refused transaction by putting a copy of the whole table back, all without a lock
(moto 5.2.5, `DynamoDBBackend.transact_write_items`). So two transactions with the same condition may both succeed, and
one that is refused may remove what another has just written. DynamoDB does neither: its transactions are serializable.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple


class OneAtATime:
    """A WSGI app that runs another without concurrency."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._lock:
            return list(self._app(environ, start_response))


if __name__ == "__main__":
    app = OneAtATime(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True, request_handler=MotoRequestHandler)
