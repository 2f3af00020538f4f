"""The internal wire: the bytes that gateway and worker exchange, encoded and matched here and nowhere else.

A connection carries HTTP/1.1, one request after the other. A gateway writes the head of `POST /generate` always in the
same form, so a worker can match it without an HTTP parser; every other request that is valid HTTP goes through the
worker's parser. A response's body is NDJSON in chunks, one line for each value of `shared.protocol`. Knows no socket
and no HTTP library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sized
from typing import NamedTuple

import msgspec

from shared import errors
from shared.parsing import BodyParser
from shared.protocol import (
    ENGINE_FAILURES,
    FINISH_REASONS,
    MAX_TYPED_TOKENS,
    Done,
    GenerateLine,
    GenerateRequest,
    State,
    TokenizeRequest,
    TokenizeResponse,
    Tokens,
)

NDJSON = "application/x-ndjson"
# What a worker's port and a pool's proxy serve, with the only method of each path. Probes ask for the last two.
ROUTES = {"/generate": "POST", "/tokenize": "POST", "/state": "GET", "/health/live": "GET", "/health/ready": "GET"}
# The query of `GET /state` for one state in place of a stream; it does not count as a gateway's.
ONCE = "once"
# The value of the header Host on a slot's own socket.
LOCAL_HOST = b"slot"
# The largest line is a `Done` with 20 most likely tokens at each of 1,024 positions of prompt and text. Such a token is
# about 35 bytes of JSON (measured: 0.7 MB in all), at most 300 with a text of 128 bytes, GPT-2's longest, all of it
# escaped: 6 MB. A longer line is garbage.
MAX_LINE_BYTES = 8 << 20
# A line of `GET /state` has some thirty counters, and texts of up to 1,024 characters.
MAX_STATE_BYTES = 1 << 16
# A problem document names the fields that are wrong.
MAX_REFUSAL_BYTES = 1 << 16
# Items of a tokenized text that are encoded at a time.
TOKENS_PER_PART = 1 << 14

# Codes of a response other than 200, and of a `failed` line. They become labels of metrics, so no others are accepted.
_REFUSALS: tuple[type[errors.TercetError], ...] = (
    errors.BodyTooLarge,
    errors.HeadersTooLarge,
    errors.InvalidJson,
    errors.InvalidRequest,
    errors.MalformedRequest,
    errors.MethodNotAllowed,
    errors.NotFound,
    errors.NotReady,
    errors.Overloaded,
    errors.PromptTooLong,
    errors.ShuttingDown,
    errors.SlotFull,
    errors.TercetError,
    errors.Unauthorized,
)
REFUSAL_CODES = frozenset(error.code for error in _REFUSALS)
FAILURE_CODES = ENGINE_FAILURES | {errors.NotReady.code}
# What the decoders below raise for bytes that are not what they decode.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.json.Encoder()
_END_OF_HEAD = b"\r\n\r\n"


class InvalidAnswer(Exception):
    """What a worker has sent is no answer to its request: `code` is `oversize`, `broken` or `garbage`. The text says
    why, and repeats nothing of it."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


# Requests: the gateway encodes, the worker matches.


def request_headers(
    *,
    host: bytes = LOCAL_HOST,
    key: str = "",
    length: int | None = None,
    request_id: str | None = None,
    session_id: bytes | None = None,
) -> list[tuple[bytes, bytes]]:
    """The headers of a request, in the order that `match_head` expects.

    Args:
        key: key of the pool; "" for none.
        length: length of the body. None if there is no body.
        session_id: header value by which a balancer keeps requests for a document together.
    """
    headers = [(b"Host", host)]
    if key:
        headers.append((b"Authorization", b"Bearer " + key.encode()))
    if length is not None:
        headers.append((b"Content-Length", b"%d" % length))
    if request_id is not None:
        headers.append((b"X-Request-Id", request_id.encode()))
    if session_id is not None:
        headers.append((b"X-Session-Id", session_id))
    return headers


class GenerateHead(NamedTuple):
    """The head of a `POST /generate` with `request_headers`: its length, that of its body, and the key's header.

    Attributes:
        authorization: b"" if there is none, as on a slot's own socket.
    """

    num_bytes: int
    content_length: int
    authorization: bytes = b""


_HEAD = re.compile(
    rb"POST /generate HTTP/1\.1\r\nHost: [^\r\n]*\r\n(?:Authorization: ([^\r\n]*)\r\n)?"
    rb"Content-Length: (\d{1,9})\r\nX-Request-Id: [^\r\n]*\r\n(?:X-Session-Id: [^\r\n]*\r\n)?\r\n"
)


def match_head(data: bytes) -> GenerateHead | None:
    """The head that a gateway sends, on a slot's own socket or to another machine, if `data` begins with it."""
    match = _HEAD.match(data)
    return None if match is None else GenerateHead(match.end(), int(match[2]), match[1] or b"")


def encode_request(request: GenerateRequest | TokenizeRequest) -> bytes:
    """The body of `POST /generate` or `POST /tokenize`."""
    return _encoder.encode(request)


_decode_generate_request = msgspec.json.Decoder(GenerateRequest).decode
_explain_generate_request = BodyParser(GenerateRequest)


def parse_generate_request(raw: bytes) -> GenerateRequest:
    """A request that `encode_request` has written, so it is not searched for fields that are sent twice.

    Raises:
        InvalidJson, InvalidRequest: as `BodyParser`.
    """
    try:
        return _decode_generate_request(raw)
    except DECODE_ERRORS:
        return _explain_generate_request(raw)


parse_tokenize_request = BodyParser(TokenizeRequest)


# Responses: the worker encodes, the gateway decodes.

LINES_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
# Head of the last response of a connection.
CLOSING_LINES_HEAD = LINES_HEAD.replace(_END_OF_HEAD, b"\r\nConnection: close\r\n\r\n")
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A chunk of a response's body. It must not be empty: that would be the last."""
    return b"%x\r\n%s\r\n" % (len(data), data)


encode_lines = _encoder.encode_lines
"""Encode values as lines."""


def encode_line(value: GenerateLine | State) -> bytes:
    return _encoder.encode(value) + b"\n"


decode_line = msgspec.json.Decoder(GenerateLine).decode
"""Decode a line of `POST /generate`. Raises one of `DECODE_ERRORS`."""

decode_state = msgspec.json.Decoder(State).decode
"""Decode a line of `GET /state`. Raises one of `DECODE_ERRORS`."""


def split_lines(
    chunks: Iterable[bytes], max_line_bytes: int | None = None, max_bytes: float = math.inf
) -> Iterator[list[bytes]]:
    """Split a body into lines without their ends; the lines completed by one chunk are in one list.

    Args:
        max_line_bytes: of a line; default: `MAX_LINE_BYTES`.
        max_bytes: of all lines.

    Raises:
        InvalidAnswer: a line, or all together, are longer than that, or the body ends within a line.
    """
    limit = MAX_LINE_BYTES if max_line_bytes is None else max_line_bytes
    rest = bytearray()
    num_bytes = 0
    for data in chunks:
        num_bytes += len(data)
        *lines, last = data.split(b"\n")
        if rest and lines:
            rest += lines[0]
            lines[0] = bytes(rest)
            rest.clear()
        rest += last
        if num_bytes > limit and (num_bytes > max_bytes or max(map(len, (*lines, rest))) > limit):
            raise InvalidAnswer("oversize", "The worker sent more bytes than its answer can have.")
        yield lines
    if rest:
        raise InvalidAnswer("broken", "The worker's response ended within a line.")


def check_done(line: Done, request: GenerateRequest) -> None:
    """Check the shape and the size of a worker's last line.

    Gateway and worker are one program, of two versions at most: what a line says within its shape is believed. Lists
    that do not fit together would fail where no other slot can be tried.

    Raises:
        InvalidAnswer: the line lacks what was requested, its lists do not fit together, or it is too long.
    """
    number, num_prompt = len(line.token_ids), line.num_prompt_tokens
    if number > request.sampling.max_new_tokens + MAX_TYPED_TOKENS:
        raise _garbage("more tokens than requested")
    if line.finish_reason not in FINISH_REASONS:
        raise _garbage("an unknown finish_reason")
    _check_lengths(number, line.logprobs, line.ends)
    if request.logprobs is not None:
        _check_lengths(number, line.token_texts, line.begins, line.tops)
    if request.echo or line.prompt_ids is not None:
        _check_lengths(num_prompt, line.prompt_ids, line.prompt_token_texts, line.prompt_ends)
        if line.prompt_logprobs is not None or line.prompt_tops is not None:
            _check_lengths(num_prompt, line.prompt_logprobs, line.prompt_tops)


def _check_lengths(number: int, *lists: Sized | None) -> None:
    for each in lists:
        if each is None:
            raise _garbage("not what was requested")
        if len(each) != number:
            raise _garbage("lists of different lengths")


def _garbage(reason: str) -> InvalidAnswer:
    return InvalidAnswer("garbage", f"The worker sent an invalid answer: {reason}.")


def encode_tokens(response: TokenizeResponse) -> Iterator[bytes]:
    """The tokens of a text, which can be a million, in parts: the encoder holds the interpreter lock for one part."""
    for name in ("ids", "texts", "ends"):
        items = getattr(response, name)
        yield b'%s"%s":[' % (b"{" if name == "ids" else b"],", name.encode())
        for start in range(0, len(items), TOKENS_PER_PART):
            part = _encoder.encode(items[start : start + TOKENS_PER_PART])[1:-1]
            yield b"," + part if start else part
    yield b'],"n_ctx":%d,"eos_id":%d,"eos_token":' % (response.n_ctx, response.eos_id)
    yield _encoder.encode(response.eos_token) + b"}"


_decode_tokens = msgspec.json.Decoder(Tokens).decode


def decode_tokens(data: bytes) -> Tokens:
    """Decode what `encode_tokens` has written, but for `texts`: of a MiB, that takes 19 ms in place of 45, during which
    no other thread has the interpreter.

    Raises:
        InvalidAnswer: its lists do not fit together.
        Exception: one of `DECODE_ERRORS`.
    """
    found = _decode_tokens(data)
    _check_lengths(len(found.ids), found.ends)
    return found


def read_refusal(status: int, body: bytes) -> tuple[str, str]:
    """The code and the detail of a response other than 200: those of its problem document, if they are one of
    `REFUSAL_CODES` and a text, else `refused` and the status."""
    try:
        problem = msgspec.json.decode(body, type=dict[str, object])
    except DECODE_ERRORS:
        problem = {}
    code, detail = problem.get("code"), problem.get("detail")
    return (
        code if isinstance(code, str) and code in REFUSAL_CODES else "refused",
        detail if isinstance(detail, str) else f"The worker answered {status}.",
    )
