"""Middleware: which `Host` and `Origin` headers are allowed, and the CORS headers of allowed origins.

Bodies are parsed as JSON whatever their content type says (`curl -d` sends a form's), so the browser sends a foreign
page's POST without a preflight. Therefore `Origin` must be the server's own or listed. `Host` must name this server:
a page that rebinds its DNS name to this address sends its own name (DNS rebinding).
"""

from __future__ import annotations

import falcon

from shared.errors import ForbiddenOrigin, UnknownHost
from shared.settings import Settings


class Origins:
    """Falcon middleware. CORS headers are set before any later check fails, so that pages can read that error."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            UnknownHost: the `Host` header does not name this server.
            ForbiddenOrigin: the request comes from a page of an origin that is not listed.
        """
        host = req.get_header("Host")
        if not self._settings.allows_host(host or ""):
            raise UnknownHost(f"Host {host or ''!r} is not served here; add its name to TERCET_HOSTS.")
        origin = req.get_header("Origin")
        if origin is None:
            return
        # The scheme is not compared: TLS may end at a proxy, and then only the proxy knows it.
        is_own = origin.partition("://")[2] == host
        if not is_own and origin not in self._settings.origins:
            raise ForbiddenOrigin(f"Pages of {origin!r} may not use this server; add it to TERCET_ORIGINS.")
        if not is_own:
            resp.set_header("Access-Control-Allow-Origin", origin)
            resp.set_header("Access-Control-Expose-Headers", "X-Request-Id, Server-Timing, Retry-After")
            resp.append_header("Vary", "Origin")
        if req.method == "OPTIONS" and req.get_header("Access-Control-Request-Method"):
            resp.set_header("Access-Control-Allow-Methods", "GET, POST, DELETE")
            resp.set_header("Access-Control-Allow-Headers", "Content-Type, Authorization, X-Request-Id")
            resp.set_header("Access-Control-Max-Age", "600")
            resp.status = falcon.HTTP_204
            resp.complete = True
