"""What is decided from the head of a request: its class of work, its API key, and whether it is refused at once.

With a key file, every request needs a valid key, unless the router leads it to an open route. That depends on the
route, not on the text of the path: two spellings of a path that lead to the same resource get the same answer, and a
path without a route gets the answer of a route that needs a key. It knows a key's rate, and not what else a key may do.

The server asks before it reads the body, from its main thread, so nothing here blocks. Where there is no such server,
the middleware asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import falcon

from gateway.middleware.rate_limits import RateLimits
from gateway.routes import Route
from gateway.server.served_app import ARRIVAL, REFUSAL, Arrival, Work
from shared.api_keys import KeyFile
from shared.errors import Unauthorized

# `POST /` of an open route is another request than `GET /`: an open route is open for reading.
READING_METHODS = frozenset({"GET", "HEAD"})
_CREDENTIALS = ("HTTP_AUTHORIZATION", "HTTP_API_KEY", "HTTP_X_API_KEY")


class Entrance:
    """Falcon middleware. It fills `req.context.owner` (the key's id) and `req.context.key` (its record)."""

    def __init__(
        self,
        find_route: Callable[[str], Route | None],
        key_file: KeyFile | None,
        default_rate: int,
        check: Callable[[str], None],
    ) -> None:
        """
        Args:
            find_route: the route of a path, decoded.
            key_file: None: no request needs a key.
            default_rate: requests per minute of a key without a rate of its own; 0 for no limit.
            check: raises the error with which a completion of this owner would be refused now.
        """
        self._find_route = find_route
        self._key_file = key_file
        self._default_rate = default_rate
        self._check = check
        self._limits = RateLimits()

    def admit(self, method: str, path: str, fields: Mapping[str, Any]) -> Arrival:
        """
        Args:
            fields: by the names that WSGI has for them.

        Raises:
            Unauthorized: the request needs a key and has no valid one.
            QuotaExceeded: its key has used up its rate.
            TercetError: as of `check`.
        """
        route = self._find_route(path)
        work = Work.READS if route is None else route.work
        is_reading = method in READING_METHODS
        key = None
        if self._key_file is not None:
            candidates = _candidates(fields)
            key = self._key_file.find(candidates)
            is_open = is_reading and route is not None and route.is_open is not None and route.is_open(fields)
            if not is_open:
                if key is None:
                    raise _unauthorized(has_key=bool(candidates))
                self._limits.take(key.id, self._default_rate if key.rate is None else key.rate)
        owner = "" if key is None else key.id
        if work is Work.COMPLETIONS:
            if method != "POST":
                work = Work.READS
            elif "respond-async" in fields.get("HTTP_PREFER", "").lower():
                work = Work.JOBS
            else:
                self._check(owner)
        return Arrival(work, owner, key)

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        """
        Raises:
            TercetError: as `admit`, which the server may have called.
        """
        if (refusal := req.env.get(REFUSAL)) is not None:
            raise refusal
        arrival = req.env.get(ARRIVAL) or self.admit(req.method, req.path, req.env)
        if arrival.key is not None:
            req.context.key, req.context.owner = arrival.key, arrival.key.id


def _candidates(fields: Mapping[str, Any]) -> list[str]:
    """The keys that a request carries. Some clients send one key in two headers, or a password for a proxy as well."""
    authorization, *others = (fields.get(name) or "" for name in _CREDENTIALS)
    scheme, _, credentials = authorization.partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, *others) if key]


def _unauthorized(*, has_key: bool) -> Unauthorized:
    detail = (
        "This API key is unknown or revoked."
        if has_key
        else "This server requires an API key: send `Authorization: Bearer <key>`, or the key as `x-api-key`."
    )
    return Unauthorized(detail, headers={"WWW-Authenticate": "Bearer"})
