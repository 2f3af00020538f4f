"""Serves the files in `static/`: the pages with the editor and the API's documentation, and the client module.

All files are read once, when the app is created, and are looked up by name, so no request can reach another path. The
security and cache headers are set here. The editor's service worker gets the list of files to keep for a reload without
the server, and their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import falcon
import msgspec

from gateway.api.operation import Answer, Operation, Operations, Parameter
from shared.errors import NotFound

# Of the WSGI environment: the path as it was asked for, where it is served as another.
ASKED_PATH = "tercet.asked_path"
STATIC = Path(__file__).parents[1] / "static"
INDEX = "index.html"
DOCS = "docs.html"
SERVICE_WORKER = "service_worker.js"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Swagger UI, which shows the API's documentation: 1.9 MB.
VIEWER = "vendor/swagger-ui"
# Content from this server only and none inline; no frame around the page, no form submissions.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# CodeMirror's script makes styles; text_editor.js gives them this nonce, and says why it need not be secret.
STYLE_NONCE = "codemirror"
IMPORT_MAP = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The browser revalidates each file at each use (304): after an upgrade it never mixes files of two versions.
    "Cache-Control": "no-cache",
}

HEADERS_OF_FILES = {"ETag": "Send it as `If-None-Match` to be answered 304 as long as the content is the same."}
NOT_MODIFIED = Answer("The content is the one that `If-None-Match` names.", headers=HEADERS_OF_FILES)


@dataclass(frozen=True, slots=True)
class Asset:
    """A static file, as it is sent."""

    data: bytes
    content_type: str
    etag: falcon.ETag
    policy: str = POLICY

    @classmethod
    def from_bytes(cls, data: bytes, content_type: str) -> Asset:
        """An HTML page with an import map may use that one inline script, and CodeMirror's styles."""
        policy = POLICY
        if content_type == CONTENT_TYPES[".html"] and (import_map := IMPORT_MAP.search(data)):
            digest = base64.b64encode(hashlib.sha256(import_map[1]).digest()).decode()
            policy += f"; script-src 'self' 'sha256-{digest}'; style-src 'self' 'nonce-{STYLE_NONCE}'"
        return cls(data, content_type, falcon.ETag(_hash(data)), policy)


def read_assets(folder: Path = STATIC) -> dict[str, Asset]:
    """The files below a folder that have a known content type, by their path in it."""
    return {
        path.relative_to(folder).as_posix(): Asset.from_bytes(path.read_bytes(), CONTENT_TYPES[path.suffix])
        for path in sorted(folder.rglob("*"))
        if path.suffix in CONTENT_TYPES
    }


class AssetResource:
    """A route that serves one file."""

    def __init__(self, asset: Asset, summary: str, content: str = "The page.") -> None:
        self._asset = asset
        answers = {200: Answer(content, {asset.content_type: str}, HEADERS_OF_FILES), 304: NOT_MODIFIED}
        self.operations: Operations = {"GET": Operation(tag="Pages", summary=summary, answers=answers)}

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        send_asset(self._asset, req, resp)


def docs_page(assets: Mapping[str, Asset]) -> Asset:
    """The page of the API's documentation. The viewer's style has its icons in it, as `data:` URLs."""
    return replace(assets[DOCS], policy=f"{POLICY}; img-src 'self' data:")


def service_worker(assets: Mapping[str, Asset]) -> Asset:
    """The editor's service worker, with the files that it keeps.

    It is served beside the page, not below `/static`, because a service worker controls only pages below its own path.
    """
    # Addresses are relative to the page's, which a proxy may serve below a prefix. Pages but the editor are left out:
    # they need the server.
    files = {
        f"static/{name}": str(asset.etag)
        for name, asset in assets.items()
        if not name.endswith((".html", ".txt")) and not name.startswith(VIEWER)
    }
    files["./"] = str(assets[INDEX].etag)
    version = _hash("".join(sorted(files.values())).encode())
    constant = msgspec.json.encode({"version": version, "files": files})
    data = b"globalThis.TERCET_ASSETS = " + constant + b";\n" + assets[SERVICE_WORKER].data
    return Asset.from_bytes(data, CONTENT_TYPES[".js"])


class StaticResource:
    """`GET /static/{name}`: scripts, styles and images, and the client module `tercet.js`; `GET /static/vendor/{name}`:
    what was made elsewhere, with its licences."""

    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag="Pages",
            summary="A file of the pages, or the client module",
            description="`tercet.js` is the client module that other editors import.",
            parameters=(Parameter("name", "path", "the file's name", example="tercet.js"),),
            answers={
                200: Answer("The file.", dict.fromkeys(CONTENT_TYPES.values(), bytes), HEADERS_OF_FILES),
                304: NOT_MODIFIED,
            },
            errors=(NotFound,),
        )
    }

    def __init__(self, assets: dict[str, Asset], folder: str = "") -> None:
        """
        Args:
            folder: the files' folder in `assets`, with a slash at its end.
        """
        self._assets = {name.removeprefix(folder): asset for name, asset in assets.items() if name.startswith(folder)}

    def on_get(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        asset = self._assets.get(name)
        if asset is None:
            raise falcon.HTTPNotFound
        send_asset(asset, req, resp)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def page_address(asked: str, served: str) -> str | None:
    """Where a browser must open a page so that the page's relative links work, relative to what was asked for; None: it
    has."""
    if served == "/":
        return None if asked.endswith("/") else f"./{asked.rpartition('/')[2]}/"
    num_slashes = len(asked) - len(asked.rstrip("/"))
    return "../" * num_slashes + served.rpartition("/")[2] if num_slashes else None


def send_asset(asset: Asset, req: falcon.Request, resp: falcon.Response) -> None:
    """Answer with a file, or with 304 if the client has it. A page whose relative links would not work where it was
    asked for, as at `/docs/`, is answered with a redirect."""
    resp.set_headers(HEADERS)
    resp.set_header("Content-Security-Policy", asset.policy)
    if asset.content_type == CONTENT_TYPES[".html"] and ASKED_PATH in req.env:
        address = page_address(req.env[ASKED_PATH], req.path)
        if address is not None:
            resp.status = falcon.HTTP_308
            resp.set_header("Location", address)
            return
    resp.etag = asset.etag
    if any(known == "*" or known == asset.etag for known in req.if_none_match or ()):
        resp.status = falcon.HTTP_304
        return
    resp.content_type = asset.content_type
    resp.data = asset.data
