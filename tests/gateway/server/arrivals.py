"""Connections whose every head is admitted, as the server does with the app's word."""

from __future__ import annotations

from gateway.server.connections import Connection, Step
from gateway.server.served_app import Arrival, Work


def admitted(connection: Connection, step: Step) -> Step:
    """The step after the head, if `step` is that a head has arrived."""
    return connection.read_body(Arrival(Work.READS, "")) if step is Step.ADMIT else step


def advance(connection: Connection, now: float) -> Step:
    return admitted(connection, connection.advance(now))
