"""The public schema of OpenAI's completions API: fields, ranges, defaults, answers and errors.

Source: openai/openai-openapi, `CreateCompletionRequest` and `CreateCompletionResponse`. Knows no HTTP server and no
model. `Meta.description` of a field is the text of its validation error.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.api.fields import MAX_SESSION_CHARS, OpenAIFields, text, whole
from gateway.api.peer_fields import PEER_FIELDS
from gateway.api.tolerance import TolerantParser

MAX_PROMPTS = 128
MAX_COMPLETIONS = 256  # of a request: prompts × best_of
# Log-probabilities in an answer, those of `echo` included. Each takes some 200 bytes of memory until it is sent.
MAX_LOGPROBS = 1 << 19
MAX_PROMPT_CHARS = 1 << 20
_Text: TypeAlias = Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)]
_TokenId: TypeAlias = Annotated[int, Meta(ge=0)]


class StreamOptions(Struct, kw_only=True, frozen=True):
    """`include_usage`: a last chunk without choices has the usage. `include_obfuscation` is ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionRequest(OpenAIFields, kw_only=True, frozen=True):
    """`POST /v1/completions`. Optional fields may be null, which is as leaving them out. Fields of other servers are
    ignored, with `warnings` in the answer if they would change it; those without which the text would be wrong, such as
    a grammar, are an error.

    The upper bounds of `max_tokens`, `max_time` and token ids depend on a setting or the model; the resource checks
    them."""

    model: Annotated[str, Meta(max_length=128, description="the name of a model being served")] = ""
    prompt: Annotated[
        _Text | list[_Text | _TokenId | list[_TokenId]],
        Meta(
            description=f"a string, a list of 1 to {MAX_PROMPTS} strings, a list of token ids, or a list of 1 to"
            f" {MAX_PROMPTS} lists of token ids"
        ),
    ] = ""
    max_tokens: Annotated[
        int,
        Meta(
            ge=-2,
            description="a whole number, 0 or more, or -1 (as many as there is room for); with echo or token ids, below"
            " the model's context",
        ),
    ] = 16
    n: Annotated[int, whole(1, 8)] = 1
    best_of: Annotated[int, Meta(ge=0, le=8, description="a whole number from n to 8 (0: n)")] | None = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | bool | None,
        Meta(
            description="a whole number from 0 to 20: most likely tokens to report at each step (true: 0, the chosen"
            " ones only; false: none)"
        ),
    ] = None
    echo: Annotated[bool, Meta(description="true (begin each text with its prompt) or false")] = False
    stream: Annotated[bool, Meta(description="true (server-sent events) or false")] = False
    stream_options: Annotated[
        StreamOptions | None, Meta(description="an object with include_usage, true or false; only with stream")
    ] = None
    suffix: Annotated[
        str,
        text(MAX_PROMPT_CHARS, ": the text after the gap that the completions fill; they end where they run into it"),
    ] = ""
    clean: Annotated[
        bool,
        Meta(
            description="true (token healing, trimming and selection as in /autocomplete; of a single text prompt,"
            " without best_of, echo and logprobs) or false"
        ),
    ] = False
    session: (
        Annotated[str, text(MAX_SESSION_CHARS, "; a newer request of the session cancels the older one")] | None
    ) = None
    max_time: Annotated[float, Meta(ge=0, description="a number of seconds (0: the limit)")] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="a whole number of tokens, 1 or more (-1: off): the end of each to use")]
        | None
    ) = None


class Logprobs(Struct, kw_only=True):
    """An item per token, of the echoed prompt and of all generated tokens, also those that are not in the text because
    they ended it.

    `token_logprobs` and `top_logprobs` are null for the first token of an echoed prompt: nothing precedes it.
    `top_logprobs` maps the most likely tokens to their log-probabilities, and contains the token itself. A token is
    named by its text; one that is only a part of a character by its bytes (`bytes:\\xc3`), one whose text another token
    has by its id (`token_id:7`). `text_offset` is where a token begins in the choice's text, in characters: a part of a
    character where the character begins, a token that a stop string removed where it would have begun.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Struct, kw_only=True):
    """A completion, or in a stream a part of one. `finish_reason` is null before the last part.

    `stop`: the model ended the text, or a stop string did. `length`: `max_tokens` or the time limit did.
    """

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None


class PromptTokensDetails(Struct, kw_only=True):
    """`cached_tokens`: prompt tokens that were not computed again."""

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens. Each prompt counts once; the completions of `best_of` that are not returned count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Completion(Struct, kw_only=True):
    """The answer, or a chunk of a stream; `usage` is null or missing in all chunks but the last. `warnings` says which
    fields were ignored."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    warnings: list[str] | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    """A model being served. `max_model_len` is its context in tokens; 0: no worker has reported it yet."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tercet"
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """The models being served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorObject(Struct, kw_only=True):
    """`param` names the field that is wrong, `code` is stable and machine-readable."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, kw_only=True):
    """An error in OpenAI's shape."""

    error: ErrorObject


# Names that vLLM, llama.cpp, chat clients and pipelines give to these fields.
ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "n_cmpl": "n",
    "num_return_sequences": "n",
    "n_probs": "logprobs",
    "repeat_penalty": "repetition_penalty",
    "truncate": "truncate_prompt_tokens",
}
# 0 means in llama.cpp's names and in some clients that a field is off.
NEUTRAL = {
    "model": ("tgi",),  # the placeholder of Text Generation Inference's documentation
    "best_of": (0,),
    "logit_bias": ([],),
    "n_probs": (0,),
    "truncate_prompt_tokens": (0, -1),
    "truncate": (0, -1),
    "max_time": (0,),
}
parse_completion_request = TolerantParser(CompletionRequest, PEER_FIELDS, ALIASES, NEUTRAL)
