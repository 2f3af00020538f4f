"""The public schema of Text Generation Inference's routes: requests, answers, stream events, errors.

Ranges and defaults are those of TGI's router (`router/src/validation.rs`), within what the engine computes. Lists of
inputs, `num_return_sequences`, `max_length` and `max_time` are those of the pipelines of transformers, which clients of
Hugging Face's API and of SageMaker send. Knows no HTTP server and no model.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.api.fields import MAX_STOP_SEQUENCES, TgiFields, whole
from gateway.api.peer_fields import PEER_FIELDS
from gateway.api.tolerance import PeerField, TolerantParser, Tolerated
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
from shared.parsing import members_of, replace_lone_surrogates

MAX_INPUT_CHARS = 1 << 20
MAX_INPUTS = 128
MAX_COMPLETIONS = 256  # of a request: inputs × completions of each
MAX_BEST_OF = 8
MAX_TOP_N_TOKENS = 5
DEFAULT_MAX_NEW_TOKENS = 100
# The texts of the Pluto deployment of GPT-2 (github.com/pluto-lang/pluto, examples), for its clients.
EMPTY_BODY = "The request body is empty. Please provide a valid input."
NO_INPUTS = "The request body is invalid. Please provide a valid input."

_encode = msgspec.json.Encoder().encode
_Input = Annotated[str, Meta(min_length=1, max_length=MAX_INPUT_CHARS)]
Inputs = Annotated[
    _Input | Annotated[list[_Input], Meta(min_length=1, max_length=MAX_INPUTS)],
    Meta(
        description=f"a string of 1 to {MAX_INPUT_CHARS} characters, the text to continue, or a list of 1 to"
        f" {MAX_INPUTS} of them"
    ),
]


class TgiParameters(TgiFields, kw_only=True, frozen=True):
    """Generation parameters. Null means the default. Without a seed, a random one is drawn; `details` say which.
    `clean` is an extension: healing, trimming and selection as in `/autocomplete`. Parameters of other servers are
    ignored, with `warnings` in the answer if they would change it; those without which the text would be wrong, such as
    a grammar, are an error."""

    best_of: (
        Annotated[int, whole(0, MAX_BEST_OF, " (0: 1): the likeliest of so many completions is the answer")] | None
    ) = None
    num_return_sequences: (
        Annotated[int, whole(1, MAX_BEST_OF, ": completions in the answer, which is a list then")] | None
    ) = None
    max_new_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="a whole number of tokens, 1 or more (-1: as many as there is room for); at most half of the"
            " model's context is generated"
        ),
    ] = None
    max_length: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="a whole number of tokens (0 and -1: off), those of the input included; max_new_tokens comes"
            " first"
        ),
    ] = None
    max_time: Annotated[float, Meta(ge=0, description="a number of seconds (0: the limit)")] | None = None
    return_full_text: Annotated[bool, Meta(description="true or false")] = False
    truncate: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="a whole number of tokens, 1 or more (0 and -1: off): the end of inputs to use"),
    ] = None
    details: Annotated[bool, Meta(description="true or false")] = False
    decoder_input_details: Annotated[bool, Meta(description="true (details have the tokens of inputs) or false")] = (
        False
    )
    top_n_tokens: Annotated[int, whole(0, MAX_TOP_N_TOKENS, ": likeliest tokens to report at each step")] = 0
    clean: Annotated[
        bool, Meta(description="true (healing, trimming and selection) or false (as the model made it)")
    ] = False

    @property
    def num_completions(self) -> int:
        """Completions of each input."""
        return max(self.best_of or 1, self.num_return_sequences or 1)


class TgiRequest(Struct, kw_only=True, frozen=True):
    """`POST /`, `/generate` and `/generate_stream`. The answer to a list of inputs is the list of their answers."""

    inputs: Inputs
    parameters: Annotated[TgiParameters | None, Meta(description="an object of generation parameters")] = None
    stream: Annotated[bool | None, Meta(description="true (server-sent events) or false")] = None

    @property
    def prompts(self) -> list[str]:
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs


# Names of OpenAI's API, of llama.cpp and of transformers.
ALIASES = {
    "n": "num_return_sequences",
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "stop_strings": "stop_sequences",
}
# Text Generation Inference publishes the string "null" as an example of some parameters.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(TgiParameters.__struct_fields__, ("null",)),
    "top_k": ("null", 0, -1),
    "truncate": ("null", 0, -1),
    "max_time": ("null", 0),
    "max_length": ("null", 0, -1),
    "best_of": ("null", 0),
}
# These change nothing, or were replaced: the plan's default model answers, whatever name a client sends.
_PEER_FIELDS = {**PEER_FIELDS, "model": PeerField("none"), "max_input_length": PeerField("none")}
parse_tgi_body = TolerantParser(TgiRequest, _PEER_FIELDS, ALIASES, NEUTRAL)


def parse_tgi_request(body: bytes) -> Tolerated[TgiRequest]:
    """
    Raises:
        InvalidJson: the body is not a JSON object, or empty, or has no `inputs`.
        InvalidRequest: as `TolerantParser`, or some fields exclude each other.
    """
    if not body.strip():
        raise InvalidJson(EMPTY_BODY)
    try:
        tolerated = parse_tgi_body(body)
    except InvalidRequest as error:
        inputs = members_of(replace_lone_surrogates(body)).get("inputs")
        if inputs is None or bytes(inputs) in {b"null", b'""', b"[]"}:
            raise InvalidJson(NO_INPUTS, fields=(FieldError("inputs", "is required"),)) from error
        raise
    check_parameters(tolerated.request.parameters or TgiParameters(), len(tolerated.request.prompts))
    return tolerated


def check_parameters(parameters: TgiParameters, num_inputs: int) -> None:
    """
    Raises:
        InvalidRequest: some fields exclude each other.
    """
    if len(parameters.stop_strings) > MAX_STOP_SEQUENCES:
        raise invalid("stop", f"and stop_sequences must be at most {MAX_STOP_SEQUENCES} strings together")
    if num_inputs * parameters.num_completions > MAX_COMPLETIONS:
        raise InvalidRequest(
            f"inputs must be at most {MAX_COMPLETIONS // parameters.num_completions} with"
            f" {parameters.num_completions} completions of each.",
            fields=(FieldError("inputs", "are too many"),),
        )
    if parameters.clean and num_inputs > 1:
        raise invalid("clean", "is only for a single text")


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
    """The answer; `details` are present if the request has them. `warnings`, of the first completion, says what was
    ignored or changed."""

    generated_text: str
    details: TgiDetails | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class TgiStreamDetails(Struct, kw_only=True):
    """Details of a stream's completion."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class TgiStreamEvent(Struct, kw_only=True):
    """An event of a stream: a token. The first may have `warnings`: what was ignored or changed. The last has the whole
    text, and `details` if the request has them."""

    index: int
    token: TgiToken
    top_tokens: list[TgiToken] | UnsetType = UNSET
    generated_text: str | None = None
    details: TgiStreamDetails | None = None
    warnings: list[str] | UnsetType = UNSET


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
    version: str


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
