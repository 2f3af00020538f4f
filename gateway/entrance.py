"""What is decided from the head of a request: its class of work, its API key, whether it is refused at once, and with
which answer. Falcon takes no part in that: under overload most requests are refused, and it takes longer than the rest.

Hosts and pages that are not listed are refused first. With a key file, every request needs a valid key, unless the
router leads it to an open route. That depends on the route, not on the text of the path: two spellings of a path that
lead to the same resource get the same answer, and a path without a route gets the answer of a route that needs a key.
It knows the rates, and not what else a key may do.

The server asks before it reads the body, in the thread that reads for all connections, so nothing here blocks. Where
there is no such server, the middleware asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import falcon

from gateway.api.error_formats import error_format_of, render_error
from gateway.api.error_handlers import REFUSALS
from gateway.metrics import NO_ROUTE, Metrics
from gateway.middleware.origins import Origins
from gateway.middleware.rate_limits import TokenBuckets
from gateway.middleware.request_log import RequestLog, request_id, shown_method, timing
from gateway.middleware.traces import Traces
from gateway.routes import JOB_BYTES, MIN_BYTES, Route
from gateway.server.request_parser import RequestHead
from gateway.server.served_app import ARRIVAL, Arrival, Work
from shared.api_keys import ApiKey, KeyFile
from shared.errors import QuotaExceeded, TercetError, Unauthorized
from shared.settings import LimitSettings

# `POST /` of an open route is another request than `GET /`: an open route is open for reading.
READING_METHODS = frozenset({"GET", "HEAD"})
# A full bucket: in largest bodies, but at least 512 of the smallest requests.
NUM_BODIES, MIN_BUCKET_BYTES = 4, 512 * MIN_BYTES
_NO_ROUTE = Route(None)  # of a path that leads nowhere
_CREDENTIALS = ("HTTP_AUTHORIZATION", "HTTP_API_KEY", "HTTP_X_API_KEY")


class Entrance:
    """Falcon middleware. It fills `owner` (the key's id), `key` (its record) and `charge` of `req.context`."""

    def __init__(
        self,
        find_route: Callable[[str], Route | None],
        origins: Origins,
        key_file: KeyFile | None,
        limits: LimitSettings,
        check: Callable[[str], None],
        metrics: Metrics,
        request_log: RequestLog,
        traces: Traces | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            find_route: the route of a path, decoded.
            key_file: None: no request needs a key.
            limits: of requests and bytes.
            check: raises the error with which a completion of this owner would be refused now.
            clock: monotonic seconds.
        """
        self._find_route = find_route
        self._origins = origins
        self._key_file = key_file
        self._limits = limits
        self._check = check
        self._metrics, self._request_log, self._traces = metrics, request_log, traces
        self._requests, self._bytes = TokenBuckets(clock), TokenBuckets(clock)

    def admit(self, method: str, path: str, version: str, fields: Mapping[str, Any], address: str) -> Arrival:
        """
        Args:
            fields: by the names that WSGI has for them.
            address: of the client; the owner of what has no valid key.

        Returns:
            Its `refusal` is one of:
            MalformedRequest, UnknownHost, ForbiddenOrigin: as of `Origins.check`.
            Unauthorized: the request needs a key and has no valid one.
            QuotaExceeded: its key, or its owner, has used up a rate.
            TercetError: as of `check`.
        """
        route = self._find_route(path) or _NO_ROUTE
        work = route.work
        if work is Work.COMPLETIONS and method != "POST":
            work = Work.READS
        elif work is Work.COMPLETIONS and "respond-async" in fields.get("HTTP_PREFER", "").lower():
            work = Work.JOBS
        key = None if self._key_file is None else self._key_file.find(_candidates(fields))
        arrival = Arrival(work, address if key is None else key.id, key, route.weight)
        try:
            self._origins.check(method, path, version, fields)
            if self._origins.preflight_headers(method, path, fields) is not None:
                return arrival._replace(work=Work.READS)  # a browser sends no key with it
            is_open = route.is_open if method in READING_METHODS else None
            if self._key_file is not None and (is_open is None or not is_open(fields)):
                if key is None:
                    raise _unauthorized(has_key=bool(_candidates(fields)))
                self._count_request(key)
            min_bytes = JOB_BYTES if work is Work.JOBS and method == "POST" else route.min_bytes
            self._charge_head(arrival, min_bytes, int(fields.get("CONTENT_LENGTH") or 0))
            if work is Work.COMPLETIONS:
                self._check(arrival.owner)
        except TercetError as error:
            return Arrival(Work.REFUSED, arrival.owner, key, route.weight, error)
        return arrival

    def _charge_head(self, arrival: Arrival, min_bytes: int, length: int) -> None:
        """Charge a request for the body that its head announces."""
        if length > self._limits.max_body_bytes:
            length = 0  # it is not read
        try:
            self._take(arrival.owner, max(min_bytes, arrival.weight * length))
        except QuotaExceeded:
            if arrival.work is not Work.HEALTH or length:  # to refuse a probe takes as long as to answer it
                raise

    def charge(self, arrival: Arrival, num_bytes: int) -> None:
        """
        Raises:
            QuotaExceeded: the request's owner may send no more bytes now.
        """
        self._take(arrival.owner, arrival.weight * num_bytes)

    def _take(self, owner: str, num_bytes: int) -> None:
        if rate := self._limits.bytes_per_s:
            self._bytes.take(
                owner,
                num_bytes,
                size=max(NUM_BODIES * self._limits.max_body_bytes, MIN_BUCKET_BYTES),
                per_second=rate,
                detail=f"This API key, or address, may send {rate} bytes a second (TERCET_BYTES_PER_S): send only the"
                " end of a document, or this request again",
            )

    def _count_request(self, key: ApiKey) -> None:
        if rate := self._limits.key_rate if key.rate is None else key.rate:
            detail = f"This API key may send {rate} requests a minute: send this one again"
            self._requests.take(key.id, 1, size=rate, per_second=rate / 60, detail=detail)

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        """
        Raises:
            TercetError: the refusal of `admit`, which the server may have called.
        """
        arrival: Arrival | None = req.env.get(ARRIVAL)
        if arrival is None:
            arrival = self.admit(req.method, req.path, req.env["SERVER_PROTOCOL"], req.env, req.remote_addr)
        if arrival.refusal is not None:
            raise arrival.refusal
        req.context.charge = partial(self.charge, arrival)
        if arrival.key is not None:
            req.context.key, req.context.owner = arrival.key, arrival.key.id

    def refuse(
        self, head: RequestHead, path: str, resource: object, error: TercetError, start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """As `ServedApp.refuse`. `path` is as the app routes it, and `resource` what it leads to, if anything."""
        start, method = time.monotonic(), shown_method(head.method)
        identifier = request_id(head.fields.get("HTTP_X_REQUEST_ID"))
        status, headers, body = render_error(error, error_format_of(resource, head.method), identifier)
        is_refused = isinstance(error, REFUSALS)
        if is_refused:
            self._metrics.refused_requests.labels(error.code).inc()
        code, seconds = int(status[:3]), time.monotonic() - start
        if self._traces is not None and head.method:
            span = self._traces.begin(method, head.fields.get("HTTP_TRACEPARENT"))
            self._traces.end(span, method, NO_ROUTE, code, identifier)
        self._request_log.record(identifier, method, NO_ROUTE, code, seconds, is_refused=is_refused)
        headers |= {"Content-Length": str(len(body)), "X-Request-Id": identifier, "Server-Timing": timing(seconds)}
        start_response(status, [*headers.items(), *self._origins.response_headers(head.method, path, head.fields)])
        return (body,)


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
