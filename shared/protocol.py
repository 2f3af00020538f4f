"""The internal protocol between gateway and worker: `POST /generate` and `GET /state` on a slot's socket.

Shapes and ranges only. This module knows no HTTP server and no model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.parsing import BodyParser

MAX_SEED = 2**63 - 1


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

parse_generate_request = BodyParser(GenerateRequest)

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
