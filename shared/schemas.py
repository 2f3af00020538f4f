"""The wire: what an editor sends and gets (`/autocomplete`), and what gateway and worker say to each other.

Shapes and ranges only, checked by msgspec; every refusal names the field, its range and what came instead.
This module knows no HTTP server and no model.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from shared.errors import FieldError, InvalidJson, InvalidRequest

MAX_SEED = 2**63 - 1
T = TypeVar("T", bound=Struct)


class AutocompleteRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`POST /autocomplete`. Ranges that depend on the model (top_k, max_tokens) are checked where it is known."""

    context: Annotated[str, Meta(description="a string: the document before the cursor")]
    n_samples: Annotated[int, Meta(ge=1, le=8, description="a whole number from 1 to 8")] = 3
    length: Annotated[int, Meta(ge=1, le=256, description="a whole number of tokens from 1 to 256")] = 20
    max_time: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="a number of seconds above 0")] = None
    model_size: Annotated[str | None, Meta(description="the name of a model being served")] = None
    temperature: Annotated[float, Meta(ge=0, le=5, description="a number from 0 to 5")] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="a whole number, 0 (off) or more")] = 50
    top_p: Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1 (0 and 1: off)")] = 0.95
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="a whole number of tokens, from 1 to what the model's context leaves beside length"),
    ] = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100, description="a number above 0, at most 100")] = 1.0
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256)]],
        Meta(max_length=8, description="a list of up to 8 strings of 1 to 256 characters"),
    ] = []
    single_line: Annotated[bool, Meta(description="true or false")] = False
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_SEED)] | None,
        Meta(description="a whole number from 0 to 9223372036854775807"),
    ] = None
    session: Annotated[
        Annotated[str, Meta(max_length=128)] | None, Meta(description="a string of up to 128 characters")
    ] = None
    stream: Annotated[bool, Meta(description="true (server-sent events) or false")] = False
    explain: Annotated[
        Annotated[int, Meta(ge=1, le=10)] | None,
        Meta(description="a whole number from 1 to 10: likeliest tokens to report beside each"),
    ] = None


# Other names under which clients of the original service and of its imitations send a field.
ALIASES = {"samples": "n_samples", "n": "n_samples"}


class TokenExplanation(Struct, kw_only=True):
    """A token that was drawn, and those that were likeliest there: text and log-probability. The first token of a
    sentence may begin with what was typed of its word."""

    text: str
    logprob: float
    likeliest: list[tuple[str, float]]


class Sentence(Struct, kw_only=True, omit_defaults=True):
    """One suggestion. `time` in seconds, `*_ms` in milliseconds; `score` is the mean log-probability of its
    tokens under the unmodified distribution, null where no token was kept. `explanation` is there where the request
    asked for one."""

    value: str
    time: float
    score: float | None
    finish_reason: str
    seed: int
    slot: int
    model: str
    tokens: int
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    explanation: list[TokenExplanation] | None = None


class BranchFailure(Struct, kw_only=True):
    """Why a branch brought nothing: a stable code and a sentence."""

    branch: int
    code: str
    detail: str


class AutocompleteResponse(Struct, kw_only=True):
    """`seed` is the first branch's: given with the same request, it gives the same answer."""

    id: str
    model: str
    seed: int
    sentences: list[Sentence]
    time: float
    partial: bool
    errors: list[BranchFailure]


class FeedbackRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`POST /feedback`: what a writer did with a sentence. `index` is its place in the answer, from 0."""

    id: Annotated[str, Meta(max_length=128, description="the id of an answer")]
    index: Annotated[int, Meta(ge=0, le=7, description="a whole number: the sentence's place in the answer, from 0")]
    action: Annotated[
        Literal["accepted", "rejected", "ignored"], Meta(description="one of accepted, rejected, ignored")
    ]
    characters: Annotated[
        int, Meta(ge=0, le=10_000, description="a whole number from 0 to 10000: characters taken over")
    ] = 0


class Sampling(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How one sequence draws its tokens; defaults and ranges as in `AutocompleteRequest`."""

    max_new_tokens: Annotated[int, Meta(ge=1)] = 20
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 50
    top_p: Annotated[float, Meta(ge=0, le=1)] = 0.95
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    stop: tuple[str, ...] = ()
    single_line: bool = False
    first_rank: Annotated[int, Meta(ge=0)] = 0


class Group(Struct, kw_only=True, frozen=True):
    """Branches of one prompt, so that a worker may compute the prompt once."""

    id: str
    size: Annotated[int, Meta(ge=1)]


class GenerateRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, omit_defaults=True):
    """`POST /generate` on a slot's socket: one branch. `deadline_ms` counts from when the worker reads it.

    With `heal`, the text goes on from before the prompt's last word and is held to what was typed of it; what comes
    back goes on from the prompt's end all the same.
    """

    prompt: str | None = None
    prompt_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    max_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    heal: bool = False
    sampling: Sampling = Sampling()
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 0
    deadline_ms: Annotated[float, Meta(gt=0)] = 30_000.0
    group: Group | None = None
    session: str | None = None
    stream: bool = False
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    request_id: str = ""


class Accepted(Struct, kw_only=True, tag="accepted", tag_field="event"):
    """The first line: the sequence is in the engine."""


class Token(Struct, kw_only=True, tag="token", tag_field="event"):
    """One more piece of text (only when streaming). It never ends inside a character or a possible stop, and may be
    empty for that. Pieces that say nothing new (`heal`) are not told."""

    text: str
    token_id: int
    logprob: float


class Top(Struct, array_like=True):
    """A token that was likely at some step."""

    token_id: int
    text: str
    logprob: float


class Done(Struct, kw_only=True, tag="done", tag_field="event"):
    """The last line. `text` is cut before a stop string; `token_ids` holds all that was generated, of which the
    first `num_kept_tokens` make up `text`, but for the first `num_typed_tokens`, which say nothing new.

    `ends` holds the characters of `text` that are there after each token. With `echo`, `prompt_ids` and
    `prompt_logprobs` tell of the prompt as used (its first has no log-probability); with `logprobs`, `tops` holds
    the likeliest tokens of each step, and `token_texts` what each token says by itself.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    ends: list[int]
    num_kept_tokens: int
    num_typed_tokens: int = 0
    finish_reason: str
    num_prompt_tokens: int
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    prompt_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    token_texts: list[str] | None = None
    tops: list[list[Top]] | None = None


class Failed(Struct, kw_only=True, tag="failed", tag_field="event"):
    """The last line of a branch that broke after it was accepted."""

    code: str
    detail: str


GenerateLine = Accepted | Token | Done | Failed

# The bodies that `parse_request` reads. msgspec builds its table of a struct's types at the first use, and two threads
# doing so at once crash the process (msgspec 0.22: the second reads a table half built). A decoder builds it: here.
_FIELDS: dict[type[Struct], dict[str, Any]] = {}
for _kind in (AutocompleteRequest, FeedbackRequest, GenerateRequest):
    msgspec.json.Decoder(_kind)
    _FIELDS[_kind] = get_type_hints(_kind, include_extras=True)

SlotState = Literal["starting", "loading", "warm", "draining", "failed", "down"]


class State(Struct, kw_only=True, frozen=True):
    """One line of `GET /state`: at each change, and at least once a second. `down` is the gateway's own word
    for a slot whose stream has ended."""

    state: SlotState
    reason: str | None = None
    progress: float = 0.0
    model: str = ""
    device: str = ""
    dtype: str = ""
    max_batch: int = 0
    n_ctx: int = 0
    in_flight: int = 0
    ms_per_token: float = 0.0
    pid: int = 0
    age: int = 0
    counters: dict[str, float] = {}


def parse_request(raw: bytes, kind: type[T], aliases: dict[str, str] | None = None) -> T:
    """Decode and check a request's body; `kind` is one of those in `_FIELDS`.

    Raises:
        InvalidJson: not a JSON object; says where it stops being one.
        InvalidRequest: a field is missing, unknown, or out of its range; names it.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(f"The body must be a JSON object: {_position(raw, str(error))}") from error
    if not isinstance(body, dict):
        raise InvalidJson(f"The body must be a JSON object, like {{...}}, not {_json_kind(body)}.")
    for alias, name in (aliases or {}).items():
        if alias in body:
            if name in body:
                raise _invalid(alias, f"is another name of {name}; send one of them")
            body[name] = body.pop(alias)
    known = _FIELDS[kind]
    if unknown := sorted(body.keys() - known.keys()):
        raise InvalidRequest(
            f"Unknown field {', '.join(unknown)}; the fields are {', '.join(known)}.",
            fields=tuple(FieldError(name, "unknown field") for name in unknown),
        )
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _explain(body, known, str(error)) from error


def _explain(body: dict[str, Any], known: dict[str, Any], message: str) -> InvalidRequest:
    if match := re.search(r"missing required field `(\w+)`", message):
        return _invalid(match[1], f"is required: {_description(known[match[1]])}")
    match = re.search(r"at `\$\.(\w+)([^`]*)`", message)
    if match is None or match[1] not in known:
        return InvalidRequest(message)
    name = match[1]
    came = body.get(name)
    shown = repr(came) if isinstance(came, int | float | bool) or came is None else _json_kind(came)
    return _invalid(name, f"must be {_description(known[name])}, not {shown}")


def _invalid(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {message}.", fields=(FieldError(name, message),))


def _description(annotation: Any) -> str:
    found = (meta.description for meta in get_args(annotation) if isinstance(meta, Meta))
    return next((text for text in found if text), "of another type")


def _json_kind(value: Any) -> str:
    kinds = {str: "a string", list: "an array", dict: "an object", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _position(raw: bytes, message: str) -> str:
    """msgspec names the byte; a person looks for a line and a column."""
    match = re.search(r"\(byte (\d+)\)", message)
    if match is None:
        return f"{message}."
    before = raw[: int(match[1])]
    line = before.count(b"\n") + 1
    column = len(before) - (before.rfind(b"\n") + 1) + 1
    return f"{message.removeprefix('JSON is malformed: ')}, line {line}, column {column}."
