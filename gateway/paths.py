"""Paths: what a request's path is served as, and which path was probably meant by one that is not served.

Clients and proxies add slashes (`/v1//models`, `/generate/`), and a proxy that serves Tercet below a path of its own
may leave that path in the request. Routing, API keys and errors all see the path that this module returns. It knows no
route.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

# Of the WSGI environment: the path as it was asked for, where it is served as another.
ASKED_PATH = "tercet.asked_path"
# How alike two names must be (0 to 1): `completion` and `completions` are, `chat` and `static` are not.
_MIN_SIMILARITY = 0.75
# Of a path, so many names are compared: a path of thousands would take a thread for a second.
_MAX_NAMES = 4


def served_path(path: str, prefix: str, is_route: Callable[[str], bool]) -> str:
    """The path without repeated slashes, without one at its end, and without the prefix.

    Args:
        prefix: the path of the public URL, "" or like "/tools/tercet".
        is_route: whether a path is served as it is; then it does not begin with the prefix by intent.
    """
    if "//" in path or (path.endswith("/") and path != "/"):
        path = "/" + "/".join(filter(None, path.split("/")))
    if prefix and (path == prefix or path.startswith(f"{prefix}/")) and not is_route(path):
        return path[len(prefix) :] or "/"
    return path


def page_address(asked: str, served: str) -> str | None:
    """Where a browser must open a page so that the page's relative links work, relative to what was asked for; None: it
    has."""
    if served == "/":
        return None if asked.endswith("/") else f"./{asked.rpartition('/')[2]}/"
    num_slashes = len(asked) - len(asked.rstrip("/"))
    return "../" * num_slashes + served.rpartition("/")[2] if num_slashes else None


def nearest_route(path: str, resources: Mapping[str, object]) -> str | None:
    """Methods and path of the route that was probably meant, as "POST /v1/completions"; None: none is near.

    Args:
        resources: resources by URI template.
    """
    routes = {route.rpartition("/")[2]: route for route in resources if not route.endswith(("/", "}"))}
    for name in path.lower().split("/")[: -_MAX_NAMES - 1 : -1]:  # the last first
        for found in difflib.get_close_matches(name, routes, n=1, cutoff=_MIN_SIMILARITY):
            resource = resources[routes[found]]
            methods = [method for method in ("GET", "POST") if hasattr(resource, f"on_{method.lower()}")]
            return f"{' or '.join(methods)} {routes[found]}"
    return None
