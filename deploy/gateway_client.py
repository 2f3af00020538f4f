"""HTTP clients of a gateway, for the command line and the supervisor: this instance's own, or one at a given URL.

They send the key of `TERCET_API_KEY`. They do not know what is requested.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import typer

from shared.certificates import ADDRESS_MISMATCH, EXPIRED, NAME_MISMATCH
from shared.errors import SPEAKS_HTTPS, StartError, refusing_os_errors
from shared.settings import Settings
from shared.version import tercet_version


def gateway_client(
    settings: Settings, environ: Mapping[str, str], url: str | None = None, timeout_s: float = 5.0
) -> httpx.Client:
    """A client of this instance's gateway, or of that at `url`; see `client_options`."""
    return httpx.Client(**client_options(settings, environ, url, timeout_s))


def client_options(settings: Settings, environ: Mapping[str, str], url: str | None, timeout_s: float) -> dict[str, Any]:
    """Options of httpx's clients for this instance's gateway, or for that at `url`.

    For this instance they trust its certificate and no other, at a URL the machine's certificate authorities, or those
    of `SSL_CERT_FILE`.

    Raises:
        StartError: the certificate cannot be read, or the key has characters that no key has.
    """
    key = _key(environ)
    if not (key.isascii() and key.isprintable()):
        raise StartError("TERCET_API_KEY is not an API key: it has characters other than letters, digits, - and _.")
    return {
        "base_url": url or settings.url,
        "headers": {"User-Agent": f"tercet/{tercet_version()}"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        "verify": ssl.create_default_context() if url else _trust(settings),
        "timeout": timeout_s,
        "trust_env": False,
    }


def _key(environ: Mapping[str, str]) -> str:
    """
    Raises:
        StartError: the file of the key cannot be read.
    """
    if not (path := environ.get("TERCET_API_KEY_FILE", "")):
        return environ.get("TERCET_API_KEY", "").strip()
    with refusing_os_errors("TERCET_API_KEY_FILE cannot be read:", Path(path)):
        return Path(path).read_text(encoding="ascii", errors="replace").strip()


def server_url(text: str | None) -> str | None:
    """The value of an option that names a server.

    Raises:
        typer.BadParameter: it is not the URL of an HTTP server.
    """
    try:
        url = None if text is None else httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url is not None and not (url.scheme in {"http", "https"} and url.host):
        raise typer.BadParameter("it must be like http://127.0.0.1:8000 or https://tercet.example")
    return text


def needs_https(response: httpx.Response) -> bool:
    """Whether a Tercet server has refused a request because its port speaks HTTPS."""
    return response.status_code == httpx.codes.BAD_REQUEST and SPEAKS_HTTPS.encode() in response.content


def tls_problem(error: Exception, url: str | None) -> str:
    """What is wrong with a server's TLS, and what to do: the predicate of a sentence. "" if `error` has another cause.

    Args:
        error: raised by a client with the options of `client_options`.
        url: theirs.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return ""
    if not isinstance(cause, ssl.SSLCertVerificationError):
        remedy = "unset TERCET_TLS_CERT" if url is None else "use http:// in the URL"
        return f"does not speak HTTPS, or no version of it in common ({cause.reason}): if it serves HTTP, {remedy}."
    if cause.verify_code == EXPIRED:
        return "has a certificate that has expired: renew it, and reload the server."
    if url is None:
        return "has another certificate than TERCET_TLS_CERT names: set it as in the environment of `tercet serve`."
    if cause.verify_code in {NAME_MISMATCH, ADDRESS_MISMATCH}:
        return "has a certificate for other names: use one of them in the URL."
    return (
        f"has a certificate that is not trusted here ({cause.verify_message}): if it is of your own authority, set "
        "SSL_CERT_FILE to a file with the authority's certificate (PEM)."
    )


def _trust(settings: Settings) -> ssl.SSLContext | bool:
    """Trusts exactly the instance's certificate, which need not name this address: the client chose the address."""
    if settings.access.tls_cert is None:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # The file may end with an intermediate certificate; its root is not required.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(settings.access.tls_cert)
    except (OSError, ssl.SSLError) as error:
        raise StartError(
            f"The certificate {settings.access.tls_cert} (TERCET_TLS_CERT) cannot be read ({error})."
        ) from error
    return context
