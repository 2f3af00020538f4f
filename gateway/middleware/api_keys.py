"""Middleware: which API key a request carries, and whether it needs one.

With a key file, every request needs a valid key, unless the router leads it to an open route. The check depends on
the route, not on the text of the path: two spellings of a path that lead to the same resource get the same answer, and
a path without a route gets the answer of a route that needs a key. It knows a key's rate, and not
what else a key may do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import falcon

from gateway.middleware.rate_limits import RateLimits
from shared.api_keys import ApiKey, KeyFile
from shared.errors import Unauthorized

# `POST /` of an open route is another request than `GET /`: an open route is open for reading.
OPEN_METHODS = frozenset({"GET", "HEAD"})
FindRoute = Callable[[str, falcon.Request], tuple[object, object, object, str | None] | None]


class ApiKeyCheck:
    """Falcon middleware. It fills `req.context.owner` (the key's id) and `req.context.key` (its record)."""

    def __init__(
        self,
        key_file: KeyFile | None,
        open_routes: Collection[str],
        open_pages: Mapping[str, Callable[[falcon.Request], bool]],
        find_route: FindRoute,
        limits: RateLimits,
        default_rate: int,
    ) -> None:
        """
        Args:
            key_file: None: no request needs a key.
            open_routes: URI templates that need no key.
            open_pages: URI templates that need no key for a request of which the function says so.
            find_route: the app's router: path and request to (resource, methods, parameters, URI template).
            default_rate: requests per minute of a key without a rate of its own; 0 for no limit.
        """
        self._key_file = key_file
        self._open_routes = frozenset(open_routes)
        self._open_pages = dict(open_pages)
        self._find_route = find_route
        self._limits = limits
        self._default_rate = default_rate

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        """
        Raises:
            Unauthorized: the request needs a key and has no valid one.
            QuotaExceeded: its key has used up its rate.
        """
        if self._key_file is None:
            return
        candidates = _candidates(req)
        key: ApiKey | None = self._key_file.find(candidates)
        if key is not None:
            req.context.key, req.context.owner = key, key.id
        if self._is_open(req):
            return
        if key is None:
            raise _unauthorized(has_key=bool(candidates))
        self._limits.take(key.id, self._default_rate if key.rate is None else key.rate)

    def _is_open(self, req: falcon.Request) -> bool:
        if req.method not in OPEN_METHODS:
            return False
        route = self._find_route(req.path, req)
        if route is None or route[3] is None:
            return False
        return route[3] in self._open_routes or (route[3] in self._open_pages and self._open_pages[route[3]](req))


def _candidates(req: falcon.Request) -> list[str]:
    """The keys that a request carries. Some clients send one key in two headers, or a password for a proxy as well."""
    scheme, _, credentials = (req.get_header("Authorization") or "").partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else None
    return [key for key in (bearer, req.get_header("api-key"), req.get_header("x-api-key")) if key]


def _unauthorized(*, has_key: bool) -> Unauthorized:
    detail = (
        "This API key is unknown or revoked."
        if has_key
        else "This server requires an API key: send `Authorization: Bearer <key>`, or the key as `x-api-key`."
    )
    return Unauthorized(detail, headers={"WWW-Authenticate": "Bearer"})
