"""The internal protocol between gateway and worker: `POST /generate`, `POST /tokenize` and `GET /state` on a slot's
socket.

Shapes and ranges only; `shared.wire` has their bytes. Knows no HTTP and no model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.sampling import Sampling as Sampling  # noqa: PLC0414 - a part of the protocol

# The number of this protocol, one more with each change that the other side has to know of: 2 has `score_last`, 3
# `score_prior`. Gateway and worker work together if either is at least the oldest that the other knows.
PROTOCOL = 3
OLDEST_PROTOCOL = 1
SCORING_PROTOCOL = 2
PRIOR_PROTOCOL = 3
MAX_SEED = 2**63 - 1
# Bytes of typed text that token healing forces, so at most as many tokens carry nothing else.
MAX_TYPED_TOKENS = 32
# Tokens at the end of a prompt by which a worker tells how well its model knows the text.
MAX_SCORED_TOKENS = 32
# Why a sequence has ended, in an answer. The engine's others are for callers that do not read an answer any more.
FINISH_REASONS = frozenset({"length", "eos", "stop", "deadline"})
# The kinds of `workers.engine.failures`: codes of `Failed`, and labels of `State.counters`.
ENGINE_FAILURES = frozenset(
    {
        "device_error",
        "hang",
        "internal_error",
        "invalid_output",
        "load_error",
        "out_of_memory",
        "sequence_error",
        "stopped",
    }
)

# Ranges of what a worker sends: a gateway that decodes a value beyond them refuses the line. The largest context and
# vocabulary are those of `workers.checkpoints.files`, the largest sums those of 1,000 workers behind one proxy.
Count = Annotated[int, Meta(ge=0, le=2**53)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# Of float32, and a sum of a million of them is finite. Rounding may take one above 0.
Logprob = Annotated[float, Meta(ge=-3.5e38, le=1.0)]
Finite = Annotated[float, Meta(ge=-3.5e38, le=3.5e38)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]


class Group(Struct, kw_only=True, frozen=True):
    """Prefill group: branches of one prompt, which a worker may compute once for all of them."""

    id: str
    size: Annotated[int, Meta(ge=1)]


class Prediction(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The branch answers the continuation with the `rank`-th likeliest next word, and ignores how tokens are drawn.

    `temperature` calibrates the probabilities of words; with `is_verbatim` the continuation is not cut after the words
    that are worth reading. With `corrects`, the first branch of a prompt that ends in a misspelled word may answer its
    correction."""

    rank: Annotated[int, Meta(ge=0, le=7)] = 0
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    is_verbatim: bool = False
    corrects: bool = False


class GenerateRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, omit_defaults=True):
    """`POST /generate` on a slot's socket: one branch. `deadline_ms` starts when the worker reads the request.

    With `heal`, the worker backs up to the last word boundary of the prompt and constrains the output to match what was
    typed (token healing). The returned text still starts at the end of the prompt.

    With `special_as_text`, what spells a special token in `prompt` and `suffix` is text, as a writer typed it;
    otherwise it is that token.

    With `score_last`, the worker reports how well the model knows this number of tokens at the end of the prompt
    (`prompt_score`); 0 reports nothing.

    With `score_prior`, the worker reports how likely the generated tokens are without the prompt (`prior_logprobs`).

    With `suffix`, the text that follows the gap, the returned text is cut where it runs into that, and no `token` lines
    are sent.

    `traceparent` (W3C Trace Context) is the parent of the spans that the worker records; "" records none.

    `owner` is the id of the API key of the request, "" without keys. The prefix cache is scoped by owner and session: a
    request reads only what requests with the same pair have written.
    """

    prompt: str | None = None
    prompt_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    max_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    heal: bool = False
    special_as_text: bool = False
    suffix: str = ""
    score_last: Annotated[int, Meta(ge=0, le=MAX_SCORED_TOKENS)] = 0
    score_prior: bool = False
    sampling: Sampling = Sampling()
    predict: Prediction | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 0
    deadline_ms: Annotated[float, Meta(gt=0)] = 30_000.0
    group: Group | None = None
    owner: str = ""
    session: str | None = None
    stream: bool = False
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    request_id: str = ""
    traceparent: str = ""


class Accepted(Struct, kw_only=True, tag="accepted", tag_field="event"):
    """The first line: the sequence is in the engine."""


class Top(Struct, array_like=True):
    """One of the most likely tokens of a step."""

    token_id: TokenId
    text: str
    logprob: Logprob


class Token(Struct, kw_only=True, tag="token", tag_field="event", omit_defaults=True):
    """A text delta (streaming only). It is empty where the text would end inside a character or a possible stop string.
    Tokens that only reproduce the typed text (`heal`) are not sent.

    With `logprobs`, `token_text` is the token's text by itself, `begin` where it begins in the text of all tokens, in
    characters, `tops` the most likely tokens of its step, and `names` as in `Done`. `prompt_score`, of the first line
    only, as in `Done`."""

    text: str
    token_id: TokenId
    logprob: Logprob
    token_text: str | None = None
    begin: Count | None = None
    tops: list[Top] | None = None
    names: dict[TokenId, str] | None = None
    prompt_score: Finite | None = None


class PredictedWord(Struct, array_like=True):
    """A word of a prediction: where it ends in the text, in characters, and the probability of all words up to it."""

    end: Count
    probability: Annotated[float, Meta(ge=0, le=1)]


class Done(Struct, kw_only=True, tag="done", tag_field="event"):
    """The last line. `token_ids` holds all generated tokens. `text` is the text of the first `num_kept_tokens` of them,
    without the first `num_typed_tokens`, which only reproduce typed text; it is cut before a stop string.

    `ends` gives the length of `text` after each token, in characters. With `logprobs`, `tops` lists the most likely
    tokens of each step, `token_texts` the text of each generated token by itself, and `begins` where each begins in the
    text of all tokens, in characters: where the character begins, if the token is a part of one. `names` has those
    tokens of the line whose text is not theirs alone, such as U+FFFD for a part of a character, with names that are
    unique in the vocabulary.

    With `echo`, `prompt_text`, `prompt_ids`, `prompt_token_texts` and `prompt_ends` (the length of `prompt_text` after
    each token, in characters) describe the prompt as used: cut to `max_prompt_tokens`, and without what `heal` makes
    part of the output. All are empty for an empty prompt, though the model then starts from `<|endoftext|>`. With
    `echo` and `logprobs`, `prompt_logprobs` and `prompt_tops` have an item for each of `prompt_ids`, null for the first
    token: nothing precedes it. They are null if the branch ended before its prompt was computed.

    With `logprobs` 0, the lists of most likely tokens are empty.

    `usefulness` of a prediction: keys that showing it should save. Its `text` is empty if there is no such word.
    `words` are those of its text, also of a fill of a gap; null if it has no text or is not cut after its words.

    A text with `replaces` is the correction of a misspelled word: it takes the place of this number of characters at
    the end of the prompt.

    `fit` of a text before a `suffix`: the higher, the better it stands between both; comparable among the branches of a
    request. Null if the branch ended before it was known, or if no beginning of the text fits, and `text` is empty.

    `prompt_score` is the mean log-probability of the characters of the last `score_last` tokens of the prompt, without
    what precedes them, in nats; a character below −4 counts as that. Null if it was not requested, or if there are too
    few tokens.

    `prior_logprobs`: the log-probability of each token, given those before it without the prompt. Null if it was not
    requested, or if the branch ended before it was known.
    """

    text: str
    token_ids: list[TokenId]
    logprobs: list[Logprob]
    ends: list[Count]
    num_kept_tokens: Count
    num_typed_tokens: Count = 0
    usefulness: Finite | None = None
    words: list[PredictedWord] | None = None
    replaces: Count = 0
    fit: Finite | None = None
    prompt_score: Finite | None = None
    prior_logprobs: list[Logprob] | None = None
    finish_reason: str
    num_prompt_tokens: Count
    cached_tokens: Count
    queue_ms: Milliseconds
    prefill_ms: Milliseconds
    decode_ms: Milliseconds
    prompt_text: str | None = None
    prompt_ids: list[TokenId] | None = None
    prompt_token_texts: list[str] | None = None
    prompt_ends: list[Count] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    prompt_tops: list[list[Top] | None] | None = None
    token_texts: list[str] | None = None
    begins: list[Count] | None = None
    tops: list[list[Top]] | None = None
    names: dict[TokenId, str] | None = None


class Failed(Struct, kw_only=True, tag="failed", tag_field="event"):
    """The last line of a branch that failed after it was accepted."""

    code: str
    detail: str


# A text of more characters is long. A worker tokenizes one long text and one other at a time: a MiB takes 0.6 s of a
# core, and 2.5 s while the engine decodes. No fewer characters than LARGE_BYTES of gateway/server/work_queue.py: all
# threads of a class could otherwise wait for long texts, in requests that are not large.
LONG_TEXT_CHARS = 64 << 10


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`POST /tokenize` on a slot's socket: text to token ids, as `POST /generate` encodes a prompt without healing."""

    text: str


class Tokens(Struct, kw_only=True):
    """What a gateway reads of a `TokenizeResponse`.

    `ends` holds the length of the text after each token, in characters; where several tokens make up one character,
    only the last counts it. `eos_token` is the text of the token `eos_id`, `bos_token` that of the token that begins a
    text (an older worker does not say). The first `num_before` tokens and the last `num_after` are not of the text: the
    model's tokenizer adds them.
    """

    ids: list[TokenId]
    ends: list[Count]
    n_ctx: Annotated[int, Meta(ge=1, le=2_000_000)]
    eos_id: TokenId
    eos_token: Annotated[str, Meta(max_length=1024)] = "<|endoftext|>"
    bos_token: Annotated[str, Meta(max_length=1024)] = ""
    num_before: Count = 0
    num_after: Count = 0


class TokenizeResponse(Tokens, kw_only=True):
    """`texts` holds each token's text by itself. Gateways of protocol 2 refuse an answer without it."""

    texts: list[str]


GenerateLine = Accepted | Token | Done | Failed

Name = Annotated[str, Meta(max_length=1024)]
SlotState = Literal["starting", "loading", "warm", "draining", "failed", "down"]


class State(Struct, kw_only=True, frozen=True):
    """One line of `GET /state`, sent at each change and at least once a second. A worker never sends `down`, which the
    gateway sets for a slot whose stream has ended. `revision` identifies the weights that the worker has loaded: slots
    with equal model and revision compute the same. `kernels` says which kernels a GPU worker uses, and whether its
    steps are CUDA graphs; empty on a CPU. `num_replicas` is how many workers a state speaks for, with `max_batch` and
    `in_flight` of all together: more than 1 where a cluster's proxy answers (Ray Serve). `num_gateways` is how many
    state streams the worker serves, so how many gateways share its batch; 0: unknown. `memory_bytes` is the
    proportional set size of a CPU worker's process, or what a GPU worker's allocator holds of the device, without the
    CUDA context. `version` is the worker's version of Tercet, `protocol` and `oldest_protocol` what it speaks; workers
    before protocol 2 do not say. `certificate_expires_at` is when the certificate of the worker's TCP port expires, in
    Unix seconds; 0: it has none."""

    state: SlotState
    reason: str | None = None
    progress: Annotated[float, Meta(ge=0, le=1)] = 0.0
    model: Name = ""
    device: Name = ""
    dtype: Name = ""
    kernels: Name = ""
    revision: Name = ""
    max_batch: Annotated[int, Meta(ge=0, le=512_000)] = 0
    n_ctx: Annotated[int, Meta(ge=0, le=2_000_000)] = 0
    vocab_size: Annotated[int, Meta(ge=0, le=2_000_000)] = 0
    num_replicas: Count = 1
    num_gateways: Count = 0
    in_flight: Count = 0
    ms_per_token: Milliseconds = 0.0
    memory_bytes: Count = 0
    pid: Count = 0
    age: Count = 0
    version: Name = ""
    protocol: Count = 1
    oldest_protocol: Count = 1
    certificate_expires_at: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    counters: dict[str, Annotated[float, Meta(ge=0, le=1e18)]] = {}
