"""The public schema of Text Generation Inference's routes: requests, answers, stream events, errors.

Ranges and defaults are those of TGI's router (`router/src/validation.rs`), within what the engine computes. A parameter
that the server cannot serve is accepted as long as it changes nothing, because clients send such values unasked. Knows
no HTTP server and no model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    FieldError,
    InvalidJson,
    InvalidRequest,
    NoCompletion,
    NotReady,
    Overloaded,
    QuotaExceeded,
    ShuttingDown,
    TercetError,
)
from shared.parsing import BodyParser
from shared.protocol import MAX_SEED

MAX_INPUT_CHARS = 1 << 20
MAX_BEST_OF = 8
MAX_STOP_SEQUENCES = 4
MAX_TOP_N_TOKENS = 5
DEFAULT_MAX_NEW_TOKENS = 100
# The texts of the Pluto deployment of GPT-2 (github.com/pluto-lang/pluto, examples), for its clients.
EMPTY_BODY = "The request body is empty. Please provide a valid input."
NO_INPUTS = "The request body is invalid. Please provide a valid input."

_encode = msgspec.json.Encoder().encode
_StopSequence = Annotated[str, Meta(min_length=1, max_length=256)]


class TgiParameters(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Generation parameters. Null means the default. The upper bounds of `max_new_tokens` and `truncate` depend on the
    model. Without a seed, a random one is drawn; `details` say which. `clean` is an extension: healing, trimming and
    selection as in `/autocomplete`."""

    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_BEST_OF)] | None,
        Meta(description=f"a whole number from 1 to {MAX_BEST_OF}: the likeliest of so many completions is the answer"),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None, Meta(description="a number above 0, up to 100")
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=100)] | None, Meta(description="a number from 0.01 to 100")
    ] = None
    frequency_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None, Meta(description="a number from -2 to 2")
    ] = None
    top_k: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="a whole number above 0")] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="a number above 0, up to 1 (off)")] = (
        None
    )
    typical_p: Annotated[
        Annotated[float, Meta(ge=1, le=1)] | None, Meta(description="1 or null: typical decoding is not supported")
    ] = None
    do_sample: Annotated[bool | None, Meta(description="true or false")] = None
    max_new_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="a whole number of tokens, from 1 to the model's context minus 1"),
    ] = None
    return_full_text: Annotated[bool | None, Meta(description="true or false")] = None
    stop: Annotated[
        Annotated[list[_StopSequence], Meta(max_length=MAX_STOP_SEQUENCES)] | None,
        Meta(description=f"a list of up to {MAX_STOP_SEQUENCES} strings of 1 to 256 characters"),
    ] = None
    stop_sequences: Annotated[
        Annotated[list[_StopSequence], Meta(max_length=MAX_STOP_SEQUENCES)] | None,
        Meta(description=f"a list of up to {MAX_STOP_SEQUENCES} strings of 1 to 256 characters, added to stop"),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_SEED)] | None,
        Meta(description="a whole number from 0 to 9223372036854775807"),
    ] = None
    truncate: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="a whole number of tokens from 1 to the model's context minus 1: the end of inputs to use"),
    ] = None
    details: Annotated[bool | None, Meta(description="true or false")] = None
    decoder_input_details: Annotated[
        bool | None, Meta(description="true (details have the tokens of inputs) or false")
    ] = None
    top_n_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_TOP_N_TOKENS)] | None,
        Meta(description=f"a whole number from 0 to {MAX_TOP_N_TOKENS}: likeliest tokens to report at each step"),
    ] = None
    watermark: Annotated[Literal[False] | None, Meta(description="false: watermarks are not supported")] = None
    grammar: Annotated[None, Meta(description="null: grammars are not supported")] = None
    adapter_id: Annotated[
        Annotated[str, Meta(max_length=0)] | None, Meta(description="null: adapters are not supported")
    ] = None
    clean: Annotated[
        bool | None, Meta(description="true (healing, trimming and selection) or false (as the model made it)")
    ] = None

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn; else decoding is greedy."""
        return bool(self.do_sample) or (self.temperature, self.top_k, self.top_p) != (None, None, None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Both lists of stop sequences, each sequence once."""
        return tuple(dict.fromkeys([*(self.stop or ()), *(self.stop_sequences or ())]))


class TgiRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`POST /`, `/generate` and `/generate_stream`."""

    inputs: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=MAX_INPUT_CHARS,
            description=f"a string of 1 to {MAX_INPUT_CHARS} characters: the text to continue",
        ),
    ]
    parameters: Annotated[TgiParameters | None, Meta(description="an object of generation parameters")] = None
    stream: Annotated[bool | None, Meta(description="true (server-sent events) or false")] = None


parse_tgi_body = BodyParser(TgiRequest)


def parse_tgi_request(body: bytes) -> TgiRequest:
    """
    Raises:
        InvalidJson: the body is not a JSON object, or empty, or has no `inputs`.
        InvalidRequest: as `BodyParser`, or some fields exclude each other.
    """
    if not body.strip():
        raise InvalidJson(EMPTY_BODY)
    try:
        request = parse_tgi_body(body)
    except InvalidRequest as error:
        if not msgspec.json.decode(body, type=dict[str, Any]).get("inputs"):
            raise InvalidJson(NO_INPUTS, fields=(FieldError("inputs", "is required"),)) from error
        raise
    parameters = request.parameters or TgiParameters()
    if len(parameters.stop_strings) > MAX_STOP_SEQUENCES:
        raise invalid("stop", f"and stop_sequences must be at most {MAX_STOP_SEQUENCES} strings together")
    if (parameters.best_of or 1) > 1 and not parameters.is_sampled:
        raise invalid("best_of", "must be 1 without sampling: greedy completions are the same; set do_sample")
    return request


def invalid(name: str, message: str) -> InvalidRequest:
    """The error of a parameter; the message completes "NAME …"."""
    return InvalidRequest(f"{name} {message}.", fields=(FieldError(f"parameters.{name}", message),))


FinishReason = Literal["length", "eos_token", "stop_sequence"]


class TgiToken(Struct, kw_only=True):
    """A generated token. `special`: it ends the text and has no text itself."""

    id: int
    text: str
    logprob: float
    special: bool


class TgiPrefillToken(Struct, kw_only=True):
    """A token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class TgiSequence(Struct, kw_only=True):
    """How a completion was made. `seed` is null for greedy decoding; `prefill` is empty without
    `decoder_input_details`; `top_tokens` is present with `top_n_tokens`."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPrefillToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET


class TgiBestOfSequence(TgiSequence, kw_only=True):
    """A completion that was less likely than the answer."""

    generated_text: str


class TgiDetails(TgiSequence, kw_only=True):
    """Details of the answer; `best_of_sequences` are the other completions, with `best_of` above 1."""

    best_of_sequences: list[TgiBestOfSequence] | UnsetType = UNSET


class TgiGeneration(Struct, kw_only=True):
    """The answer; `details` are present if the request has them."""

    generated_text: str
    details: TgiDetails | UnsetType = UNSET


class TgiStreamDetails(Struct, kw_only=True):
    """Details of a stream's completion."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class TgiStreamEvent(Struct, kw_only=True):
    """An event of a stream: a token. The last has the whole text, and `details` if the request has them."""

    index: int
    token: TgiToken
    top_tokens: list[TgiToken] | UnsetType = UNSET
    generated_text: str | None = None
    details: TgiStreamDetails | None = None


class TgiInfo(Struct, kw_only=True):
    """`GET /info`: the model that the routes of Text Generation Inference use, and its limits."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    router: str


class TgiError(Struct, kw_only=True):
    """An error. `error_type` is validation, generation, overloaded, incomplete_generation, or null: see the HTTP
    status."""

    error: str
    error_type: str | None


_VALIDATION = (InvalidJson, InvalidRequest, BodyTooLarge)
_OVERLOADED = (Overloaded, QuotaExceeded, NotReady, ShuttingDown)


class TgiErrors:
    """Errors as Text Generation Inference has them."""

    content_type = "application/json"
    body_type = TgiError

    def status(self, error: TercetError) -> int:
        match error:
            case Overloaded():
                return 429
            case NoCompletion():
                return 424
            case DeadlineExceeded():
                return 500
        return error.status

    def body(self, error: TercetError, _request_id: str) -> bytes:
        return _encode(TgiError(error=error.detail, error_type=_error_type(error)))

    def event(self, error: TercetError, request_id: str) -> bytes:
        return b"data: %s\n\n" % self.body(error, request_id)


def _error_type(error: TercetError) -> str | None:
    if isinstance(error, _VALIDATION):
        return "validation"
    if isinstance(error, _OVERLOADED):
        return "overloaded"
    if isinstance(error, NoCompletion):
        return "generation"
    return "incomplete_generation" if error.status >= 500 else None


TGI_ERRORS = TgiErrors()
