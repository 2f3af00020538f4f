"""Connections whose every head is admitted, as the server does with the app's word."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from gateway.server.connections import Connection, Step
from gateway.server.served_app import Arrival, Work
from shared.errors import QuotaExceeded


def open_connection(
    sock: socket.socket,
    client: Any = "",
    *,
    max_body_bytes: int,
    tls: ssl.SSLContext | None = None,
    max_charged: int = 0,
) -> Connection:
    """
    Args:
        max_charged: bytes of bodies in chunks that are not refused; 0 for all.
    """
    charged = 0

    def charge(_arrival: Arrival, num_bytes: int) -> None:
        nonlocal charged
        charged += num_bytes
        if max_charged and charged > max_charged:
            raise QuotaExceeded("Too many bytes.", retry_after_s=1)

    return Connection(sock, client, "", now=0.0, max_body_bytes=max_body_bytes, charge=charge, tls=tls)


def admitted(connection: Connection, step: Step) -> Step:
    """The step after the head, if `step` is that a head has arrived."""
    return connection.read_body(Arrival(Work.READS, "")) if step is Step.ADMIT else step


def advance(connection: Connection, now: float) -> Step:
    return admitted(connection, connection.advance(now))
