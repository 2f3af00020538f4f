"""Which class of work a request belongs to, and whose it is, from its head, before it is parsed.

Both decide only who waits for whom. A request in the wrong class is answered like any other; but what is in doubt must
not get into the class of completions, so a path is read as the router will read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

from gateway.paths import served_path
from gateway.server.work import Work

_REQUEST_LINE = re.compile(rb"[\r\n]*([A-Z]+) (?:[a-z]+://[^/ ]*)?([^ ?#]*)")
_CREDENTIALS = re.compile(rb"\r\n(?:authorization|api-key|x-api-key):[ \t]*([^\r]*)", re.IGNORECASE)
_WANTS_JOB = re.compile(rb"\r\nprefer:[^\r]*respond-async", re.IGNORECASE)


def classify(head: bytes, routes: Mapping[str, Work], prefix: str, *, needs_keys: bool) -> tuple[Work, str]:
    """
    Args:
        routes: classes by URI template, of a path without fields or with one at its end; others are `READS`.
        prefix: the path of the public URL.
        needs_keys: requests need an API key.

    Returns:
        The class, and what distinguishes the request's owner from others: the key as it was sent, valid or not; ""
        if there is none.
    """
    end = head.find(b"\r\n\r\n")
    head = head[: end + 2]
    owner = ""
    if needs_keys and (credentials := _CREDENTIALS.search(head)) is not None:
        owner = credentials[1].decode("latin-1")
    line = _REQUEST_LINE.match(head)
    if line is None:
        return Work.READS, owner
    path = line[2].decode("latin-1")
    work = routes.get(path) or _work_of(path, routes, prefix)
    if work is Work.COMPLETIONS:
        if line[1] != b"POST":
            work = Work.READS
        elif _WANTS_JOB.search(head):
            work = Work.JOBS
    return work, owner


def _work_of(path: str, routes: Mapping[str, Work], prefix: str) -> Work:
    decoded = unquote_to_bytes(path).decode("latin-1")
    served = served_path(decoded, prefix, lambda path: path in routes or _template_of(path) in routes)
    return routes.get(served) or routes.get(_template_of(served)) or Work.READS


def _template_of(path: str) -> str:
    """The path with its last part as a field."""
    return path.rpartition("/")[0] + "/{}"
