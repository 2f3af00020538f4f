"""Middleware: which `Host` and `Origin` headers are allowed, and the CORS headers of allowed origins.

Bodies are parsed as JSON whatever their content type says (`curl -d` sends a form's), so the browser sends a foreign
page's POST without a preflight. Therefore `Origin` must be the server's own or listed, but for static files: they hold
nothing of a user, and the client module that a page loads from here can say what is missing. `Host` must name this
server: a page that rebinds its DNS name to this address sends its own name (DNS rebinding). Balancers and kubelets send
what they like to a health check, or no `Host`, so its routes answer any.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import falcon

from gateway import cors
from shared.errors import ForbiddenOrigin, MalformedRequest, UnknownHost
from shared.settings import Settings

STATIC_PREFIX = "/static/"
MAX_REMEMBERED = 256  # values of a header


class Origins:
    """Falcon middleware. CORS headers are set before any later check fails, so that pages can read that error."""

    def __init__(self, settings: Settings, health_paths: Collection[str] = ()) -> None:
        # What clients send seldom differs; the checks take several times as long as the rest.
        self._allows_host = lru_cache(MAX_REMEMBERED)(settings.allows_host)
        self._allows_origin = lru_cache(MAX_REMEMBERED)(settings.access.allows_origin)
        self._health_paths = frozenset(health_paths)

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            MalformedRequest: a request of HTTP/1.1 has no `Host` header (RFC 9112, § 3.2).
            UnknownHost: the `Host` header does not name this server.
            ForbiddenOrigin: the request comes from a page of an origin that is not listed.
        """
        host = req.get_header("Host") or ""
        if req.path not in self._health_paths and not self._allows_host(host):
            if "HTTP_HOST" not in req.env and req.env["SERVER_PROTOCOL"] == "HTTP/1.1":
                raise MalformedRequest("A request in HTTP/1.1 must have a Host header.")
            raise UnknownHost(f"Host {host!r} is not served here; add its name to TERCET_HOSTS.")
        if req.path.startswith(STATIC_PREFIX) and req.method in {"GET", "HEAD"}:
            resp.set_header("Access-Control-Allow-Origin", "*")  # whoever asks, so that caches need no `Vary`
            return
        origin = req.get_header("Origin")
        # The scheme is not compared: TLS may end at a proxy, and then only the proxy knows it.
        if origin is None or (host and origin in {f"http://{host}", f"https://{host}"}):
            return
        if not self._allows_origin(origin):
            raise ForbiddenOrigin(f"Pages of {origin!r} may not use this server; add it to TERCET_ORIGINS.")
        for name, value in cors.response_headers(origin):
            resp.append_header(name, value)
        # A browser sends no key with a preflight.
        if req.method == "OPTIONS" and (headers := cors.preflight_headers(req.get_header)) is not None:
            for name, value in headers:
                resp.append_header(name, value)
            resp.status = falcon.HTTP_204
            resp.complete = True
