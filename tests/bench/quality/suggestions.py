"""Where the simulated writers get suggestions from: the gateway."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from rich.console import Console

from deploy.load.clients import LOOPBACK, Connection
from deploy.load.options import Options
from deploy.load.run import start_server
from shared.errors import StartError
from tests.bench.quality.keystrokes import Answer

NUM_WARM_UPS = 10
SEEDS_APART = 1000  # further than a request's branches and those that replace them
# A connection that was idle, or a machine with other load. The latency is that of the last attempt.
RETRIED = {0, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
RETRY_WAITS_S = (0.0, 1.0, 2.0, 4.0, 8.0)


class GatewaySource:
    """The gateway, over a connection of each thread's own."""

    def __init__(self, port: int, fields: Mapping[str, Any]) -> None:
        """
        Args:
            port: the gateway's, on the loopback interface.
            fields: fields of each request, as in `POST /autocomplete`.
        """
        self._port = port
        self._fields = fields
        self._thread = threading.local()

    def suggest(self, context: str, seed: int) -> Answer:
        """
        Raises:
            StartError: the request failed, so that savings would be too low.
        """
        if not hasattr(self._thread, "connection"):
            self._thread.connection = Connection(LOOPBACK, self._port)
        body = {"context": context, "seed": seed, **self._fields}
        done = self._thread.connection.exchange(body)
        for wait_s in RETRY_WAITS_S:
            if done.status not in RETRIED:
                break
            time.sleep(wait_s)
            done = self._thread.connection.exchange(body)
        if done.status != HTTPStatus.OK:
            raise StartError(f"The server under test answered with status {done.status} (0: connection lost).")
        sentences = json.loads(done.answer)["sentences"]
        usefulness = tuple(sentence["usefulness"] for sentence in sentences if "usefulness" in sentence)
        return Answer(tuple(sentence["value"] for sentence in sentences), done.ms, usefulness)

    def close(self) -> None:
        """Close the calling thread's connection."""
        self._thread.connection.__exit__()


@contextmanager
def gateway_source(options: Options, fields: Mapping[str, Any], console: Console) -> Iterator[GatewaySource]:
    """A server of its own, warmed up."""
    with start_server(console, options.models, options.server_settings) as server:
        source = GatewaySource(server.port, fields)
        for seed in range(NUM_WARM_UPS):
            source.suggest("Once upon a time there was", seed)
        yield source
