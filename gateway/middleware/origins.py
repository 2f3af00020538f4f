"""Which `Host` and `Origin` headers are allowed, and the CORS headers of allowed origins.

Bodies are parsed as JSON whatever their content type says (`curl -d` sends a form's), so the browser sends a foreign
page's POST without a preflight. Therefore `Origin` must be the server's own or listed, but for static files: they hold
nothing of a user, and the client module that a page loads from here can say what is missing. `Host` must name this
server: a page that rebinds its DNS name to this address sends its own name (DNS rebinding). Balancers and kubelets send
what they like to a health check, or no `Host`, so its routes answer any.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import falcon

from shared.errors import ForbiddenOrigin, MalformedRequest, UnknownHost
from shared.settings import Settings

STATIC_PREFIX = "/static/"
MAX_REMEMBERED = 256  # values of a header
_REQUEST = "HTTP_ACCESS_CONTROL_REQUEST"
_METHODS = ("GET", "POST", "DELETE")
# What Tercet sends and scripts could not read otherwise; OpenAI's SDK decides by x-should-retry.
_EXPOSED_HEADERS = (
    "X-Request-Id, Server-Timing, Retry-After, x-should-retry, Location, Preference-Applied, WWW-Authenticate, Allow"
)
_MAX_AGE_S = 600
# Drafts under both names let a page of a public site reach a private address only after such a preflight. Chrome's
# Local Network Access, which replaced them, asks the user instead and sends no header.
_NETWORKS = ("Private-Network", "Local-Network")
# A method or a header name (RFC 9110 5.6.2).
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Origins:
    """Falcon middleware that adds CORS headers; the entrance calls `check`. Fields are by the names that WSGI has."""

    def __init__(self, settings: Settings, health_paths: Collection[str] = ()) -> None:
        # What clients send seldom differs; the checks take several times as long as the rest.
        self._allows_host = lru_cache(MAX_REMEMBERED)(settings.allows_host)
        self._allows_origin = lru_cache(MAX_REMEMBERED)(settings.access.allows_origin)
        self._health_paths = frozenset(health_paths)

    def check(self, method: str, path: str, version: str, fields: Mapping[str, Any]) -> None:
        """
        Raises:
            MalformedRequest: a request of HTTP/1.1 has no `Host` header (RFC 9112, § 3.2).
            UnknownHost: the `Host` header does not name this server.
            ForbiddenOrigin: the request comes from a page of an origin that is not listed.
        """
        host = fields.get("HTTP_HOST", "")
        if path not in self._health_paths and not self._allows_host(host):
            if "HTTP_HOST" not in fields and version == "HTTP/1.1":
                raise MalformedRequest("A request in HTTP/1.1 must have a Host header.")
            raise UnknownHost(f"Host {host!r} is not served here; add its name to TERCET_HOSTS.")
        origin = _foreign_origin(method, path, fields)
        if origin is not None and not self._allows_origin(origin):
            raise ForbiddenOrigin(f"Pages of {origin!r} may not use this server; add it to TERCET_ORIGINS.")

    def response_headers(self, method: str, path: str, fields: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The CORS headers of every response to this request, an error too."""
        if _is_static(method, path):
            return [("Access-Control-Allow-Origin", "*")]  # whoever asks, so that caches need no `Vary`
        origin = _foreign_origin(method, path, fields)
        if origin is None or not self._allows_origin(origin):
            return []
        return [
            ("Access-Control-Allow-Origin", origin),
            ("Access-Control-Expose-Headers", _EXPOSED_HEADERS),
            ("Vary", "Origin"),
        ]

    def preflight_headers(self, method: str, path: str, fields: Mapping[str, Any]) -> list[tuple[str, str]] | None:
        """The further headers of the response to a preflight of a listed origin; None: the request is not one. It
        has no body, so none is read without an API key.

        Whatever the page wants to send is allowed: the listed origin is trusted, and clients add headers of their own.
        """
        if method != "OPTIONS" or not (requested := fields.get(f"{_REQUEST}_METHOD")):
            return None
        has_body = int(fields.get("CONTENT_LENGTH") or 0) > 0 or "HTTP_TRANSFER_ENCODING" in fields
        if has_body or not self.response_headers(method, path, fields):
            return None
        methods = [*_METHODS, *([requested] if requested not in _METHODS and _TOKEN.fullmatch(requested) else [])]
        names = [name.strip() for name in (fields.get(f"{_REQUEST}_HEADERS") or "").split(",")]
        allowed = [name for name in names if _TOKEN.fullmatch(name)]
        networks = [
            network for network in _NETWORKS if fields.get(f"{_REQUEST}_{network.upper().replace('-', '_')}") == "true"
        ]
        return [
            ("Access-Control-Allow-Methods", ", ".join(methods)),
            *([("Access-Control-Allow-Headers", ", ".join(allowed))] if allowed else []),
            *[(f"Access-Control-Allow-{network}", "true") for network in networks],
            ("Access-Control-Max-Age", str(_MAX_AGE_S)),
            ("Vary", "Access-Control-Request-Method, Access-Control-Request-Headers"),
        ]

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        request = req.method, req.path, req.env
        for name, value in self.response_headers(*request):
            resp.append_header(name, value)
        if (headers := self.preflight_headers(*request)) is not None:
            for name, value in headers:
                resp.append_header(name, value)
            resp.status = falcon.HTTP_204
            resp.complete = True


def _is_static(method: str, path: str) -> bool:
    return path.startswith(STATIC_PREFIX) and method in {"GET", "HEAD"}


def _foreign_origin(method: str, path: str, fields: Mapping[str, Any]) -> str | None:
    """The origin of the page that sends the request, unless it is the server's own or what it asks for is static."""
    origin: str | None = fields.get("HTTP_ORIGIN")
    host = fields.get("HTTP_HOST")
    # The scheme is not compared: TLS may end at a proxy, and then only the proxy knows it.
    is_own = origin is None or _is_static(method, path) or (host and origin in {f"http://{host}", f"https://{host}"})
    return None if is_own else origin
