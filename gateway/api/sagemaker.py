"""The two routes of a SageMaker container: `GET /ping` is `gateway.api.health`'s, `POST /invocations` is here.

An endpoint has a single route for all clients: the body's field decides on the dialect that answers, errors included.
The content type decides only whether a body is JSON lines, CSV or plain text, as batch transforms and SageMaker's own
containers have them. Knows the fields of the dialects, not what they do.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import falcon
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.api.error_formats import PROBLEM_DETAILS, ErrorFormat
from gateway.api.peer_fields import PEER_FIELDS
from gateway.api.tgi import TgiResponder
from gateway.api.tgi_schema import (
    ALIASES,
    MAX_INPUT_CHARS,
    NEUTRAL,
    Inputs,
    TgiGeneration,
    TgiParameters,
    TgiRequest,
    check_parameters,
)
from gateway.api.tolerance import PeerField, TolerantParser, Tolerated
from shared.errors import FieldError, InvalidJson, InvalidRequest, TercetError
from shared.parsing import members_of, replace_lone_surrogates

# SageMaker passes it on from the client's `CustomAttributes`.
ATTRIBUTES_HEADER = "X-Amzn-SageMaker-Custom-Attributes"
_SESSION = re.compile(r"(?:^|[;,])\s*session=([^;,\s]{1,128})")
# Values of the deployment that Patsnap published: three texts for each input, up to ten inputs a request.
MAX_INPUTS = 10
PARAMETERS = TgiParameters(
    num_return_sequences=3,
    max_new_tokens=20,
    truncate=256,
    temperature=1.0,
    top_k=50,
    top_p=0.95,
    return_full_text=True,
)
_Input = Annotated[str, Meta(max_length=MAX_INPUT_CHARS)]
_encode = msgspec.json.Encoder().encode
Respond = Callable[[falcon.Request, falcon.Response, bytes], None]


# Media types of a body with one request per line.
JSON_LINES = frozenset(
    {
        "application/jsonlines",
        "application/x-jsonlines",
        "application/jsonl",
        "application/x-ndjson",
        "application/ndjson",
    }
)
# The body is a text, unless it is a JSON object: browsers send JSON as text/plain, too.
PLAIN_TEXT = frozenset({"text/plain", "application/x-text"})
MAX_LINES = 128


@dataclass(frozen=True, slots=True)
class InvocationDialect:
    """How a request with a dialect's field is answered."""

    respond: Respond
    error_format: ErrorFormat = PROBLEM_DETAILS


class InvocationsResource:
    """`POST /invocations`."""

    def __init__(self, dialects: Mapping[str, InvocationDialect]) -> None:
        """
        Args:
            dialects: dialects by the field of the body that each of them requires.
        """
        self._dialects = dialects

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            InvalidRequest: the body has no dialect's field.
            TercetError: as the dialect's resource.
        """
        body = req.bounded_stream.read()
        match = _SESSION.search(req.get_header(ATTRIBUTES_HEADER) or "")
        req.context.session = match[1] if match else None
        media_type = (req.get_header("Content-Type") or "").partition(";")[0].strip().lower()
        if media_type in JSON_LINES:
            self._respond_lines(req, resp, body)
            resp.content_type = media_type
            return
        if media_type == "text/csv":
            body = _encode({"inputs": _column(body)})
        elif media_type in PLAIN_TEXT and not _is_object(body):
            body = _encode({"inputs": body.decode(errors="replace")})
        self._respond(req, resp, body)

    def _respond(self, req: falcon.Request, resp: falcon.Response, body: bytes) -> None:
        dialect = self._dialects[self._field(replace_lone_surrogates(body))]
        req.context.error_format = dialect.error_format
        dialect.respond(req, resp, body)

    def _respond_lines(self, req: falcon.Request, resp: falcon.Response, body: bytes) -> None:
        """Answer a request per line, with a line for each.

        Raises:
            TercetError: a line's request failed; the message has the line's number.
        """
        lines = [(number, line) for number, line in enumerate(body.splitlines(), 1) if line.strip()]
        if not 1 <= len(lines) <= MAX_LINES:
            raise InvalidJson(f"The body must have 1 to {MAX_LINES} lines with a JSON object each, not {len(lines)}.")
        answers = []
        for number, line in lines:
            one = falcon.Response()
            try:
                self._respond(req, one, line)
            except TercetError as error:
                error.detail = f"Line {number}: {error.detail}"
                raise
            if (close := getattr(one.stream, "close", None)) is not None:
                close()
                raise InvalidRequest(
                    f"Line {number}: stream must be false in JSON lines.",
                    fields=(FieldError("stream", "must be false"),),
                )
            answers.append((one.data or b"").strip() + b"\n")
        resp.data = b"".join(answers)

    def _field(self, body: bytes) -> str:
        members = members_of(body)
        for name in self._dialects:
            if name in members:
                return name
        names = ", ".join(self._dialects)
        raise InvalidRequest(
            f"The body has none of the fields {names}: send the one of your client's API.",
            fields=tuple(FieldError(name, "is missing") for name in self._dialects),
        )


def _is_object(body: bytes) -> bool:
    try:
        members_of(replace_lone_surrogates(body))
    except InvalidJson:
        return False
    return True


def _column(body: bytes) -> list[str]:
    """The texts of a CSV body: its column `inputs`.

    Raises:
        InvalidJson: it is not CSV, it or one of its rows has no such column, or it has no rows.
    """
    try:
        rows = list(csv.reader(io.StringIO(body.decode("utf-8-sig", errors="replace"), newline="")))
    except csv.Error as error:  # a text beyond the parser's limit of 128 KiB, or a NUL
        raise InvalidJson(f"The body is not CSV that can be read: {error}; send the texts as JSON.") from error
    header = [name.strip() for name in rows[0]] if rows else []
    texts = [(number, row) for number, row in enumerate(rows[1:], 2) if row]
    if "inputs" not in header or not texts:
        raise InvalidJson(
            "A body of text/csv must begin with a header that has a column inputs, and have 1 row or more."
        )
    index = header.index("inputs")
    for number, row in texts:  # a row that is left out would shift all later answers
        if len(row) <= index:
            raise InvalidJson(f"Row {number} of the CSV body has no column inputs.")
    return [row[index] for _, row in texts]


class PatsnapRequest(Struct, kw_only=True, frozen=True):
    """A text, or several. That deployment's parameters are fixed."""

    input: Annotated[
        _Input | Annotated[list[_Input], Meta(min_length=1, max_length=MAX_INPUTS)],
        Meta(description=f"a string, or a list of 1 to {MAX_INPUTS} strings, of up to {MAX_INPUT_CHARS} characters"),
    ]


class PatsnapResponse(Struct, kw_only=True):
    """Three texts that begin with the input, likeliest first; for a list of inputs, a list of three for each."""

    output: list[str] | list[list[str]]
    warnings: list[str] | UnsetType = UNSET


_FIXED = PeerField("warned", ({},), "; send inputs in place of input for completions with parameters")
_PARAMETERS = ("parameters", *TgiParameters.__struct_fields__, "n", "max_tokens")
parse_patsnap_request = TolerantParser(PatsnapRequest, {**PEER_FIELDS, **dict.fromkeys(_PARAMETERS, _FIXED)})


class PatsnapResponder:
    """Answers `{"input": …}` with the default model's completions, unchanged."""

    def __init__(self, tgi: TgiResponder) -> None:
        self._tgi = tgi

    def respond(self, req: falcon.Request, resp: falcon.Response, body: bytes) -> None:
        """
        Raises:
            TercetError: as `TgiResponder.generations`, or one of a text's completions is missing.
        """

        def parse() -> Tolerated[TgiRequest]:
            parsed = parse_patsnap_request(body)
            request = TgiRequest(inputs=parsed.request.input, parameters=PARAMETERS)
            return Tolerated(request, parsed.warnings, parsed.num_unknown)

        request, found = self._tgi.generations(req, parse, needs_all=True)
        resp.data = _encode(PatsnapResponse(output=_texts(request, found), warnings=found[0][0].warnings))


class JumpStartRequest(TgiParameters, kw_only=True, frozen=True):
    """`{"text_inputs": …}` of JumpStart's text-generation containers: the parameters stand beside the text."""

    text_inputs: Inputs


class JumpStartResponse(Struct, kw_only=True):
    """The texts; of a list, a list for each."""

    generated_texts: list[str] | list[list[str]]
    warnings: list[str] | UnsetType = UNSET


parse_jumpstart_request = TolerantParser(JumpStartRequest, PEER_FIELDS, ALIASES, NEUTRAL)


class JumpStartResponder:
    """Answers `{"text_inputs": …}`."""

    def __init__(self, tgi: TgiResponder) -> None:
        self._tgi = tgi

    def respond(self, req: falcon.Request, resp: falcon.Response, body: bytes) -> None:
        """
        Raises:
            TercetError: as `TgiResponder.generations`.
        """

        def parse() -> Tolerated[TgiRequest]:
            parsed = parse_jumpstart_request(body)
            request = TgiRequest(inputs=parsed.request.text_inputs, parameters=parsed.request)
            check_parameters(parsed.request, len(request.prompts))
            return Tolerated(request, parsed.warnings, parsed.num_unknown)

        request, found = self._tgi.generations(req, parse)
        resp.data = _encode(JumpStartResponse(generated_texts=_texts(request, found), warnings=found[0][0].warnings))


def _texts(request: TgiRequest, generations: list[list[TgiGeneration]]) -> list[str] | list[list[str]]:
    """The texts of each input, or of the only one."""
    texts = [[one.generated_text for one in found] for found in generations]
    return texts[0] if isinstance(request.inputs, str) else texts
