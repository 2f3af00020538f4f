"""The CORS headers that let pages of a listed origin read a response, and send the request that a preflight describes.

Pure functions of header values. Which origins are listed is `AccessSettings.allows_origin`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from shared.settings import AccessSettings

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
_ORIGIN_FIELD = re.compile(rb"\r\norigin:[ \t]*([!-~]+)[ \t]*(?=\r\n)", re.IGNORECASE)


def response_headers(origin: str) -> list[tuple[str, str]]:
    """The headers of every response to a page of this listed origin."""
    return [
        ("Access-Control-Allow-Origin", origin),
        ("Access-Control-Expose-Headers", _EXPOSED_HEADERS),
        ("Vary", "Origin"),
    ]


def preflight_headers(get_header: Callable[[str], str | None]) -> list[tuple[str, str]] | None:
    """The further headers of the response to a preflight; None: the OPTIONS request is not one.

    Whatever the page wants to send is allowed: the listed origin is trusted, and clients add headers of their own.

    Args:
        get_header: returns a header of the request by name.
    """
    method = get_header("Access-Control-Request-Method")
    if not method:
        return None
    methods = [*_METHODS, *([method] if method not in _METHODS and _TOKEN.fullmatch(method) else [])]
    names = [name.strip() for name in (get_header("Access-Control-Request-Headers") or "").split(",")]
    allowed = [name for name in names if _TOKEN.fullmatch(name)]
    networks = [network for network in _NETWORKS if get_header(f"Access-Control-Request-{network}") == "true"]
    return [
        ("Access-Control-Allow-Methods", ", ".join(methods)),
        *([("Access-Control-Allow-Headers", ", ".join(allowed))] if allowed else []),
        *[(f"Access-Control-Allow-{network}", "true") for network in networks],
        ("Access-Control-Max-Age", str(_MAX_AGE_S)),
        ("Vary", "Access-Control-Request-Method, Access-Control-Request-Headers"),
    ]


def refusal_headers(request: bytes, access: AccessSettings) -> list[tuple[str, str]]:
    """The headers that let a page of a listed origin read why its request was refused.

    Args:
        request: its bytes, which may be incomplete.
    """
    if not access.origins:
        return []
    found = _ORIGIN_FIELD.findall(request.partition(b"\r\n\r\n")[0] + b"\r\n")
    origin = found[0].decode("ascii") if len(found) == 1 else ""
    return response_headers(origin) if access.allows_origin(origin) else []
