"""Middleware: which `Host` and `Origin` headers are allowed, and the CORS headers of allowed origins.

Bodies are parsed as JSON whatever their content type says (`curl -d` sends a form's), so the browser sends a foreign
page's POST without a preflight. Therefore `Origin` must be the server's own or listed. `Host` must name this server:
a page that rebinds its DNS name to this address sends its own name (DNS rebinding). Balancers and kubelets send what
they like to a health check, or no `Host`, so its routes answer any.
"""

from __future__ import annotations

from collections.abc import Collection

import falcon

from shared.errors import ForbiddenOrigin, UnknownHost
from shared.settings import Settings

ALLOWED_HEADERS = (
    "Content-Type, Authorization, api-key, x-api-key, X-Request-Id, X-Session-Id, Prefer, Idempotency-Key, traceparent"
)
EXPOSED_HEADERS = "X-Request-Id, Server-Timing, Retry-After, Location, Preference-Applied"


class Origins:
    """Falcon middleware. CORS headers are set before any later check fails, so that pages can read that error."""

    def __init__(self, settings: Settings, health_paths: Collection[str] = ()) -> None:
        self._settings = settings
        self._health_paths = frozenset(health_paths)

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            UnknownHost: the `Host` header does not name this server.
            ForbiddenOrigin: the request comes from a page of an origin that is not listed.
        """
        host = req.get_header("Host") or ""
        if req.path not in self._health_paths and not self._settings.allows_host(host):
            raise UnknownHost(f"Host {host!r} is not served here; add its name to TERCET_HOSTS.")
        origin = req.get_header("Origin")
        # The scheme is not compared: TLS may end at a proxy, and then only the proxy knows it.
        if origin is None or (host and origin in {f"http://{host}", f"https://{host}"}):
            return
        if origin not in self._settings.access.origins:
            raise ForbiddenOrigin(f"Pages of {origin!r} may not use this server; add it to TERCET_ORIGINS.")
        resp.set_header("Access-Control-Allow-Origin", origin)
        resp.set_header("Access-Control-Expose-Headers", EXPOSED_HEADERS)
        resp.append_header("Vary", "Origin")
        if req.method == "OPTIONS" and req.get_header("Access-Control-Request-Method"):
            # A browser sends no key with a preflight.
            resp.set_header("Access-Control-Allow-Methods", "GET, POST, DELETE")
            resp.set_header("Access-Control-Allow-Headers", ALLOWED_HEADERS)
            resp.set_header("Access-Control-Max-Age", "600")
            resp.status = falcon.HTTP_204
            resp.complete = True
