"""Requests to the Tercet server, and what went wrong with them in words that say what to do.

It knows HTTP and the server's errors. It does not know the editor or when to request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx
import msgspec

from deploy.clients.lsp.suggestions import Answer
from deploy.gateway_client import needs_https, tls_problem

CONNECT_TIMEOUT_S = 2.0
TIMEOUT_S = 10.0  # of a whole request and its answer
RETRY_AFTER_S = 1.0  # after a failure whose answer names no time
MAX_RETRY_AFTER_S = 60.0
MAX_ANSWER_BYTES = 1_000_000
MAX_DETAIL_CHARS = 500
_NOT_JSON = (msgspec.DecodeError, UnicodeError, RecursionError)


class Superseded(Exception):
    """A newer request of the session cancelled this one."""


class Problem(Exception):
    """Why there is no answer, in words for the user.

    Attributes:
        is_temporary: it passes without the user.
        retry_after_s: how long unasked requests have to wait.
    """

    def __init__(self, message: str, *, is_temporary: bool = False, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary
        self.retry_after_s = retry_after_s


class _Slot(msgspec.Struct):
    state: str


class _Readiness(msgspec.Struct):
    slots: list[_Slot]


class Gateway:
    """A Tercet server."""

    def __init__(self, options: Mapping[str, Any], url: str | None) -> None:
        """
        Args:
            options: httpx's, from `deploy.gateway_client.client_options`.
            url: theirs.
        """
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        # An answer's size is bounded as it is received. By the session a load balancer keeps requests and reports at
        # one gateway; in a request's body is that of its document.
        headers = {**options["headers"], "Accept-Encoding": "identity", "X-Session-Id": secrets.token_hex(8)}
        self._http = httpx.AsyncClient(**{**options, "timeout": timeout, "headers": headers})
        self._given_url = url
        self._url = str(options["base_url"]).rstrip("/")
        self._has_key = "Authorization" in options["headers"]
        self._has_answered = False  # the last request

    async def complete(self, body: Mapping[str, Any]) -> Answer:
        """The answer to a request for suggestions. Cancelling the task closes the connection, which ends the request.

        Raises:
            Superseded: a newer request of its session came.
            Problem: the server is away or refuses the request.
        """
        if not self._has_answered:
            await self._check_loaded()
        self._has_answered = False
        response = await self._send("POST", "/autocomplete", body)
        try:
            answer = msgspec.json.decode(response.content, type=Answer)
        except _NOT_JSON as error:
            raise Problem(f"The server at {self._url} is not Tercet. {_OTHER_SERVER}") from error
        self._has_answered = True
        return answer

    async def report_acceptance(self, answer_id: str, index: int, num_chars: int) -> None:
        """
        Raises what `complete` does.
        """
        body = {"id": answer_id, "index": index, "action": "accepted", "characters": num_chars}
        await self._send("POST", "/feedback", body)

    async def _check_loaded(self) -> None:
        """
        Raises:
            Problem: no slot has loaded its model. A request would wait for one without a word to the user.
        """
        response = await self._send("GET", "/health/ready")
        with suppress(*_NOT_JSON):  # if it is not Tercet, the request says so
            states = [slot.state for slot in msgspec.json.decode(response.content, type=_Readiness).slots]
            if states and "warm" not in states:
                message = f"The model at {self._url} is still loading. Suggestions begin when it is ready."
                raise Problem(message, is_temporary=True)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            async with asyncio.timeout(TIMEOUT_S), self._http.stream(method, path, json=body) as stream:
                content = bytearray()
                async for part in stream.aiter_raw():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        message = f"The server at {self._url} is not Tercet: its answer does not end. {_OTHER_SERVER}"
                        raise Problem(message)
            # Without the others: httpx would decompress what a server has compressed nevertheless.
            headers = {"Retry-After": stream.headers.get("Retry-After", "")}
            response = httpx.Response(stream.status_code, headers=headers, content=bytes(content))
        except (httpx.TimeoutException, TimeoutError) as error:
            raise Problem(f"The Tercet server at {self._url} does not answer in time.") from error
        except httpx.TransportError as error:
            if problem := tls_problem(error, self._given_url):
                raise Problem(f"The Tercet server at {self._url} {problem}") from error
            message = f"No Tercet server answers at {self._url}. Start it with `tercet serve`. {_OTHER_SERVER}"
            raise Problem(message) from error
        if needs_https(response):
            remedy = "name it with https://" if self._given_url else "set TERCET_TLS_CERT as in its environment"
            raise Problem(f"The Tercet server at {self._url} serves HTTPS: {remedy}. {_OTHER_SERVER}")
        if not response.is_success and method == "POST":
            raise self._refusal(response)
        return response

    def _refusal(self, response: httpx.Response) -> Exception:
        try:
            problem = msgspec.json.decode(response.content, type=dict[str, Any])
            code, detail = problem["code"], str(problem["detail"])[:MAX_DETAIL_CHARS]
        except (*_NOT_JSON, KeyError):
            status = response.status_code
            return Problem(f"The server at {self._url} is not Tercet (its status: {status}). {_OTHER_SERVER}")
        retry_after = response.headers.get("Retry-After", "")
        retry_after_s = min(float(retry_after), MAX_RETRY_AFTER_S) if retry_after.isdecimal() else RETRY_AFTER_S
        if code == "superseded":
            return Superseded()
        if response.status_code == 401:
            state = "does not accept the API key" if self._has_key else "requires an API key"
            return Problem(f"The Tercet server at {self._url} {state}. {_KEY}")
        if code == "unknown_model":
            return Problem(f"{detail} Change the setting `tercet.model`.")
        return Problem(
            f"The Tercet server at {self._url} refuses the request: {detail}",
            is_temporary=response.status_code in {429, 503},
            retry_after_s=retry_after_s,
        )


_OTHER_SERVER = "For another server, change the setting `tercet.url` or the option --url of `tercet lsp`."
_KEY = "Set one in TERCET_API_KEY, or as the setting `tercet.key` if the address is a setting too."
