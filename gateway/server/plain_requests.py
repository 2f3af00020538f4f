"""WSGI for requests and responses of the common form, without gunicorn's parser, environment and response objects.

What those cost is in docs/PERFORMANCE.md, CPU per answer. A request is plain if no part of it could be read in two
ways. Its environment is the one that gunicorn would make; tests/gateway/server/test_plain_requests.py compares the
two. gunicorn's code handles all other requests, and those that gunicorn refuses.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from typing import Any

# Far below gunicorn's limits, which count in other ways.
MAX_HEAD_BYTES = 4000
MAX_FIELDS = 50
# No underscore in a name, which WSGI cannot tell from a hyphen; nothing to decode in the path; no folded line.
_HEAD = re.compile(
    rb"POST (/(?!/)[A-Za-z0-9.~_/-]*)(?:\?([A-Za-z0-9.~_&=,+-]*))? HTTP/1\.1\r\n"
    rb"((?:[A-Za-z0-9-]+:[\t -~]*\r\n)+)\r\n"
)
# They say how the request is framed, or what the connection is used for.
_SPECIAL = frozenset({"HTTP_TRANSFER_ENCODING", "HTTP_EXPECT", "HTTP_UPGRADE", "HTTP_TE", "HTTP_TRAILER"})
_UNPREFIXED = {"HTTP_CONTENT_TYPE": "CONTENT_TYPE", "HTTP_CONTENT_LENGTH": "CONTENT_LENGTH"}


def plain_environ(
    data: bytes | bytearray, base: Mapping[str, Any], sock: object, client: tuple[Any, ...], server: tuple[Any, ...]
) -> dict[str, Any] | None:
    """The WSGI environment of a request, or None if it is not plain.

    Args:
        data: one complete request, whose end is known.
        base: what is the same for every request.
        sock: gunicorn's `gunicorn.socket`.
        client, server: addresses and ports.
    """
    match = _HEAD.match(data)
    if match is None or match.end() > MAX_HEAD_BYTES:
        return None
    path, query, fields = match.groups()
    lines = fields.decode("ascii").split("\r\n")
    if len(lines) > MAX_FIELDS:
        return None
    uri = path.decode("ascii")
    environ = {
        **base,
        "wsgi.input": io.BytesIO(bytes(memoryview(data)[match.end() :])),  # of bytes, which it does not copy
        "gunicorn.socket": sock,
        "REQUEST_METHOD": "POST",
        "PATH_INFO": uri,
        "QUERY_STRING": "" if query is None else query.decode("ascii"),
        "RAW_URI": uri if query is None else f"{uri}?{query.decode('ascii')}",
        "REMOTE_ADDR": client[0],
        "REMOTE_PORT": str(client[1]),
        "SERVER_NAME": server[0],
        "SERVER_PORT": str(server[1]),
    }
    num_keys = len(environ)
    for line in lines[:-1]:
        name, _, value = line.partition(":")
        key = "HTTP_" + name.upper().replace("-", "_")
        environ[_UNPREFIXED.get(key, key)] = value.strip(" \t")
    if len(environ) != num_keys + len(lines) - 1:  # a field is repeated
        return None
    if not _SPECIAL.isdisjoint(environ) or environ.get("HTTP_CONNECTION", "keep-alive").lower() != "keep-alive":
        return None
    return environ


def plain_head(status: str, headers: Sequence[tuple[str, str]]) -> bytes | None:
    """The head of a response whose connection is kept, or None if its body has no length or must be empty.

    Raises:
        ValueError: a header contains a line break, which would start another header, or is not Latin-1.
    """
    if status.startswith(("1", "204", "304")) or not any(name == "content-length" for name, _ in headers):
        return None
    lines = [
        f"HTTP/1.1 {status}\r\nServer: gunicorn\r\nDate: {_date(int(time.time()))}\r\nConnection: keep-alive\r\n",
        *[f"{name}: {value}\r\n" for name, value in headers],
        "\r\n",
    ]
    head = "".join(lines)
    if head.count("\n") != len(headers) + 5 or head.count("\r") != len(headers) + 5:
        raise ValueError("A header contains a line break.")
    return head.encode("latin-1")


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
