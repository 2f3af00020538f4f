"""The public schema of `/autocomplete` and `/feedback`: fields, ranges and defaults.

Knows no HTTP server and no model. `Meta.description` of a field is the text of its validation error.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.api.fields import MAX_SESSION_CHARS, OwnFields, number, text, whole
from gateway.api.peer_fields import PEER_FIELDS
from gateway.api.tolerance import TolerantParser
from shared.parsing import BodyParser

# No model reads more, and TERCET_MAX_BODY_BYTES is this by default.
MAX_CONTEXT_CHARS = 1 << 20
MAX_FEEDBACK_CHARS = 10_000


class JobRequest(OwnFields, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`POST /jobs`: without the fields that only a waiting client can use. The upper bounds of `max_time` and
    `max_tokens` depend on a setting or the model; the resource checks them. A null is as leaving a field out."""

    context: Annotated[str, text(MAX_CONTEXT_CHARS, ": the document before the cursor")]
    suffix: (
        Annotated[str, text(MAX_CONTEXT_CHARS, ": the text after the cursor, before which the sentences have to fit")]
        | None
    ) = None
    n_samples: Annotated[int, whole(1, 8)] = 3
    length: Annotated[int, whole(1, 256, of=" of tokens")] = 20
    max_time: Annotated[float, Meta(gt=0, description="a number of seconds above 0")] | None = None
    model_size: (
        Annotated[str, Meta(max_length=128, description="the name of a model being served, of up to 128 characters")]
        | None
    ) = None
    strategy: Annotated[
        Literal["sample", "idea", "predict"],
        Meta(
            description="sample (drawn by temperature, top_k and top_p), idea (samples that end with a sentence or"
            " clause, ranked for a writer) or predict (the likeliest next words; those parameters and seed have no"
            " effect)"
        ),
    ] = "sample"
    min_probability: Annotated[
        float,
        number(0, 1, ": predictions are cut after the last word that is this probable together with all before it"),
    ] = 0.0
    max_tokens: (
        Annotated[
            int,
            Meta(
                ge=-1,
                description="a whole number of tokens, from 1 to the model's context minus length, or -1 (that many)",
            ),
        ]
        | None
    ) = None
    clean: Annotated[
        bool,
        Meta(description="true, or false: completions as the model made them, without healing, trimming and selection"),
    ] = True
    familiar_only: Annotated[
        bool,
        Meta(
            description="true: no sentence where the model does not know text like the end of the context, such as"
            " another language or script; or false"
        ),
    ] = False
    explain: Annotated[int, whole(1, 10, ": most likely tokens to report at each step")] | None = None


class AutocompleteRequest(JobRequest, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`POST /autocomplete`."""

    session: Annotated[str, text(MAX_SESSION_CHARS)] | None = None
    sequence: Annotated[
        int, whole(0, 2**53 - 1, ": its number in its session; one that arrives after a higher number is superseded")
    ] = 0
    stream: Annotated[bool, Meta(description="true (server-sent events) or false")] = False
    corrections: Annotated[
        bool,
        Meta(description="true: a misspelled word before the cursor may have a sentence that replaces it; or false"),
    ] = False


# Field names that clients of Write With Transformer and of similar services send.
ALIASES = {"samples": "n_samples", "n": "n_samples"}
# And those of a published deployment with jobs.
JOB_ALIASES = {**ALIASES, "prompt": "context", "num_samples": "n_samples", "top_n": "top_k"}


class TokenExplanation(Struct, kw_only=True):
    """A token of a sentence, and the most likely tokens at its step: text and log-probability.

    The first token of a sentence may begin with the part of its word that was typed (token healing).
    """

    text: str
    logprob: float
    likeliest: list[tuple[str, float]]


class PredictedWord(Struct, kw_only=True):
    """A word of a prediction, with the white space and the marks before it.

    `probability`: that all words up to this one come next, given the text before them and what is typed of the first.
    """

    text: str
    probability: float


class Sentence(Struct, kw_only=True, omit_defaults=True):
    """A suggestion. `time` is in seconds.

    `score` is the mean log-probability of its tokens under the model's unmodified distribution, null if it has no
    tokens. `explanation` is present if the request has `explain`, `usefulness` if its strategy is `predict`: the keys
    that taking the sentence should save, on average over right and wrong ones. So are `words`, and
    `probability`, that of all of them, unless `clean` is false. A sentence with `replaces` is a correction: it takes
    the place of this number of characters before the cursor.
    """

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
    usefulness: float | None = None
    probability: float | None = None
    words: list[PredictedWord] | None = None
    replaces: int = 0
    explanation: list[TokenExplanation] | None = None


class TokenEvent(Struct, kw_only=True):
    """An event of a stream: text that a branch has generated."""

    branch: int
    text: str


class SentenceEvent(Sentence, kw_only=True, omit_defaults=True):
    """An event of a stream: the suggestion of a branch that has finished."""

    branch: int


class FailedBranch(Struct, kw_only=True):
    """Why a branch failed, or why its completion was rejected: a stable code and a sentence."""

    branch: int
    code: str
    detail: str


class AutocompleteResponse(Struct, kw_only=True):
    """The answer. `seed` is the first branch's: the same request with this seed gets the same sentences."""

    id: str
    model: str
    seed: int
    sentences: list[Sentence]
    time: float
    partial: bool
    errors: list[FailedBranch]


class FeedbackRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`POST /feedback`: what a writer did with a sentence. `index` is its rank in the answer.

    `kept` belongs to the action `accepted`. It may come with the first report or, once, with a later one of the same
    `id`, `index` and `action`, whose `characters` are ignored.
    """

    id: Annotated[str, Meta(max_length=128, description="the id of an answer, of up to 128 characters")]
    index: Annotated[int, whole(0, 7, ": the sentence's place")]
    action: Annotated[
        Literal["accepted", "rejected", "ignored"], Meta(description="one of accepted, rejected, ignored")
    ]
    characters: Annotated[int, whole(0, MAX_FEEDBACK_CHARS, ": characters taken over")] = 0
    kept: (
        Annotated[
            int, whole(0, MAX_FEEDBACK_CHARS, ": those of the characters taken over that are in the document later")
        ]
        | None
    ) = None


parse_autocomplete_request = BodyParser(AutocompleteRequest, ALIASES)
parse_job_request = BodyParser(JobRequest, JOB_ALIASES)
# Where a body has that deployment's names, it is a client of others, whose further fields do not fail it. Its page
# sends what its form holds: strings.
OTHERS_NAMES = frozenset(JOB_ALIASES.keys() - ALIASES.keys())
parse_others_job_request = TolerantParser(JobRequest, PEER_FIELDS, JOB_ALIASES, numbers_as_strings=True)
parse_feedback_request = BodyParser(FeedbackRequest)
