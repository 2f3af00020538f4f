"""The first item of a branch, as a worker replica passes it to the ingress: accepted, or refused.

Ray wraps an exception of a replica and sends its traceback; a refusal is an ordinary value.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.errors import PROBLEM_JSON, TercetError


class Refusal(NamedTuple):
    """A response other than 200: its status, headers and problem document."""

    status: int
    headers: dict[str, str]
    body: bytes


class Acceptance(NamedTuple):
    """The name of the worker that has accepted a branch, and the branch's first lines."""

    worker: str
    lines: bytes


def refusal_of(error: TercetError, request_id: str | None) -> Refusal:
    """The response for `error`."""
    return Refusal(error.status, {**error.headers, "Content-Type": PROBLEM_JSON}, error.problem(request_id))
