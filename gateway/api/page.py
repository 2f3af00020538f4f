"""The page to write in, and the client module that any editor may import: the files in `static/`, from memory.

They are read once, when the app is made, and are all there is: a name is looked up, never a path. What a browser
may do with them is said here; what they do themselves is theirs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import falcon

STATIC = Path(__file__).parents[1] / "static"
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Nothing from elsewhere, nothing inline, no frame around it, no plugin, no form that leaves.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Asked about at each use, answered 304: after an upgrade nobody runs half of the old page.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is sent."""

    data: bytes
    content_type: str
    etag: falcon.ETag


def read_assets(folder: Path = STATIC) -> dict[str, Asset]:
    """The files to serve, by name."""
    return {path.name: _asset(path) for path in sorted(folder.iterdir()) if path.suffix in CONTENT_TYPES}


def _asset(path: Path) -> Asset:
    data = path.read_bytes()
    return Asset(data, CONTENT_TYPES[path.suffix], falcon.ETag(hashlib.sha256(data).hexdigest()[:32]))


class PageResource:
    """`GET /`: the page."""

    def __init__(self, assets: dict[str, Asset]) -> None:
        self._index = assets[INDEX]

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        _send(self._index, req, resp)

    on_head = on_get


class StaticResource:
    """`GET /static/{name}`: what the page is made of."""

    def __init__(self, assets: dict[str, Asset]) -> None:
        self._assets = assets

    def on_get(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        asset = self._assets.get(name)
        if asset is None:
            raise falcon.HTTPNotFound
        _send(asset, req, resp)

    on_head = on_get


def _send(asset: Asset, req: falcon.Request, resp: falcon.Response) -> None:
    resp.set_headers(HEADERS)
    resp.etag = asset.etag
    if any(known == "*" or known == asset.etag for known in req.if_none_match or ()):
        resp.status = falcon.HTTP_304
        return
    resp.content_type = asset.content_type
    resp.data = asset.data
