"""The page and the static files, in process."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest

from gateway.api.page import STATIC
from tests.gateway.conftest import Gateway

CONTENT_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_as_it_is(gateway: Gateway, name: str) -> None:
    response = gateway.client.simulate_get(f"/static/{name}")
    assert response.status_code == 200
    assert response.content == (STATIC / name).read_bytes()
    assert response.headers["Content-Type"].startswith(CONTENT_TYPES[name.rpartition(".")[2]])


def test_the_root_is_the_page(gateway: Gateway) -> None:
    response = gateway.client.simulate_get("/")
    assert response.content == (STATIC / "index.html").read_bytes()
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"


def test_the_service_worker_names_every_file_of_the_editor_with_its_hash(gateway: Gateway) -> None:
    response = gateway.client.simulate_get("/service_worker.js")
    assert response.headers["Content-Type"] == "text/javascript; charset=utf-8"
    constant, _, script = response.text.partition(";\n")
    assert script == (STATIC / "service_worker.js").read_text()
    files = json.loads(constant.removeprefix("globalThis.TERCET_ASSETS = "))["files"]
    kept = {name for name in FILES if not name.endswith((".html", ".txt")) and "swagger-ui" not in name}
    assert files.keys() == {"./", *(f"static/{name}" for name in kept)}
    for address, hash_digits in files.items():
        content = gateway.client.simulate_get(f"/{address.removeprefix('./')}").content
        assert hashlib.sha256(content).hexdigest().startswith(hash_digits)
        assert len(hash_digits) == 32


@pytest.mark.parametrize("path", ["/", "/docs", "/static/page.js", "/service_worker.js"])
def test_security_and_cache_headers(gateway: Gateway, path: str) -> None:
    headers = gateway.client.simulate_get(path).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["Content-Security-Policy"].split(";"))
    import_map = (STATIC / "index.html").read_text().partition('<script type="importmap">')[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(import_map.encode()).digest()).decode()
    only_here = {
        "/": {"script-src": f"'self' 'sha256-{digest}'", "style-src": "'self' 'nonce-codemirror'"},
        "/docs": {"img-src": "'self' data:"},
    }
    assert policy == {
        "default-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    } | only_here.get(path, {})
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-cache"


@pytest.mark.parametrize("path", ["/", "/static/tercet.js", "/service_worker.js", "/openapi.json"])
def test_a_known_version_is_not_sent_again(gateway: Gateway, path: str) -> None:
    first = gateway.client.simulate_get(path)
    etag = first.headers["ETag"]
    assert etag.strip('"') == hashlib.sha256(first.content).hexdigest()[:32]
    for known in (etag, f'"other", {etag}', "*"):
        again = gateway.client.simulate_get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["ETag"] == etag
        assert again.headers["Cache-Control"] == "no-cache"
    changed = gateway.client.simulate_get(path, headers={"If-None-Match": '"other"'})
    assert (changed.status_code, changed.content) == (200, first.content)


@pytest.mark.parametrize("name", ["none.js", "../app.py", "..%2Fapp.py", "%2Fetc%2Fpasswd", "page.js/x", "", "vendor"])
def test_unknown_names_are_not_found(gateway: Gateway, name: str) -> None:
    response = gateway.client.simulate_get(f"/static/{name}")
    assert response.status_code == 404
    assert response.json["code"] == "not_found"
