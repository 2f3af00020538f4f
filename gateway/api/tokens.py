"""`POST /tokenize` and `GET /tokenizer_info`: the tokenizer of the default model, for clients that have none.

Two dialects share `/tokenize`. The body's field decides: `inputs` is Text Generation Inference's, answered with a list
of tokens; `prompt` is vLLM's, which lm-evaluation-harness sends, answered with token ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from typing import Annotated, ClassVar

import falcon
import msgspec
from msgspec import Meta, Struct

from gateway.api.callers import caller_of
from gateway.api.error_formats import ErrorFormat
from gateway.api.operation import JSON, Answer, Operation, Operations
from gateway.api.peer_fields import PEER_FIELDS
from gateway.api.tgi import TAG, tokens_of
from gateway.api.tgi_schema import MAX_INPUT_CHARS, TGI_ERRORS, TgiParameters
from gateway.api.tolerance import TolerantParser
from gateway.generation.request_starter import RequestStarter
from gateway.pool.tokenizing import PoolTokenizer
from shared.errors import (
    DeadlineExceeded,
    InvalidJson,
    InvalidRequest,
    NotReady,
    Overloaded,
    QuotaExceeded,
    TercetError,
)
from shared.parsing import members_of, replace_lone_surrogates
from shared.protocol import Tokens

# Texts are bounded like requests for completions, so these errors can occur.
_ERRORS_OF_TURNS: tuple[type[TercetError], ...] = (QuotaExceeded, Overloaded, NotReady, DeadlineExceeded)
_TEXT = f"a string of up to {MAX_INPUT_CHARS} characters"
_encode = msgspec.json.Encoder().encode
# Tokens that are encoded at once: 2 ms of CPU time.
TOKENS_AT_ONCE = 4096


class TokenizeInputs(Struct, kw_only=True, frozen=True):
    """`POST /tokenize` in Text Generation Inference's dialect. `parameters` change nothing."""

    inputs: Annotated[str, Meta(max_length=MAX_INPUT_CHARS, description=_TEXT)]
    parameters: Annotated[TgiParameters | None, Meta(description="an object of generation parameters")] = None


class TokenizePrompt(Struct, kw_only=True, frozen=True):
    """`POST /tokenize` in vLLM's dialect. Without `add_special_tokens`, the tokens that the model's tokenizer adds to a
    prompt are included, too."""

    prompt: Annotated[str, Meta(max_length=MAX_INPUT_CHARS, description=_TEXT)]
    model: Annotated[str | None, Meta(description="a string: the default model is used, whatever it says")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="true or false")] = None
    return_token_strs: Annotated[bool | None, Meta(description="true or false")] = None


class TextToken(Struct, kw_only=True):
    """A token and its place in the text, in characters."""

    id: int
    text: str
    start: int
    stop: int


class TokenIds(Struct, kw_only=True):
    """The ids of a text's tokens. `max_model_len` is the model's context; `token_strs` are the tokens' texts, if the
    request has `return_token_strs`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfo(Struct, kw_only=True):
    """The tokenizer's special tokens and the model's context."""

    tokenizer_class: str
    bos_token: str
    eos_token: str
    pad_token: str | None
    eos_token_id: int
    model_max_length: int
    chat_template: str | None


# Nothing of a tokenization depends on the fields that clients send besides, so the answer needs no warnings.
parse_inputs = TolerantParser(TokenizeInputs, PEER_FIELDS)
parse_prompt = TolerantParser(TokenizePrompt, PEER_FIELDS)


class TokenizeResource:
    """`POST /tokenize`."""

    error_format: ClassVar[ErrorFormat] = TGI_ERRORS
    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag=TAG,
            summary="Tokens of a text",
            description="With `inputs`, the answer is a list of tokens; with `prompt`, an object with their ids.",
            bodies=(parse_inputs, parse_prompt),
            examples={"inputs": {"inputs": "The old man"}, "prompt": {"prompt": "The old man"}},
            answers={200: Answer("The tokens.", {JSON: list[TextToken] | TokenIds})},
            errors=(InvalidJson, InvalidRequest, *_ERRORS_OF_TURNS),
        )
    }

    def __init__(self, starter: RequestStarter, tokenizer: PoolTokenizer) -> None:
        self._starter = starter
        self._tokenizer = tokenizer

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            InvalidJson, InvalidRequest: the request is wrong.
            QuotaExceeded, ClientGone, Overloaded, NotReady, DeadlineExceeded: it has no turn, or not in time.
        """
        body = req.bounded_stream.read()
        if "inputs" in (members := members_of(replace_lone_surrogates(body))) or "prompt" not in members:
            text = parse_inputs(body).request.inputs
            resp.data = _encode_texts(text, _tokens_of(self._starter, self._tokenizer, req, text))
            return
        request = parse_prompt(body).request
        found = _tokens_of(self._starter, self._tokenizer, req, request.prompt)
        if request.add_special_tokens is False:
            own = slice(found.num_before, len(found.ids) - found.num_after)
            found.ids, found.ends = found.ids[own], found.ends[own]
        texts = [token.text for token in _text_tokens(request.prompt, found)] if request.return_token_strs else None
        resp.data = _encode(
            TokenIds(count=len(found.ids), max_model_len=found.n_ctx, tokens=found.ids, token_strs=texts)
        )


class TokenizerInfoResource:
    """`GET /tokenizer_info`."""

    error_format: ClassVar[ErrorFormat] = TGI_ERRORS
    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag=TAG,
            summary="The tokenizer's special tokens",
            answers={200: Answer("What a client needs to use `POST /tokenize` as a tokenizer.", {JSON: TokenizerInfo})},
            errors=_ERRORS_OF_TURNS,
        )
    }

    def __init__(self, starter: RequestStarter, tokenizer: PoolTokenizer) -> None:
        self._starter = starter
        self._tokenizer = tokenizer

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            TercetError: as `POST /tokenize`.
        """
        found = _tokens_of(self._starter, self._tokenizer, req, "")
        resp.data = _encode(
            TokenizerInfo(
                tokenizer_class="GPT2TokenizerFast",
                bos_token=found.bos_token or found.eos_token,
                eos_token=found.eos_token,
                pad_token=None,
                eos_token_id=found.eos_id,
                model_max_length=found.n_ctx,
                chat_template=None,
            )
        )


def _tokens_of(starter: RequestStarter, tokenizer: PoolTokenizer, req: falcon.Request, text: str) -> Tokens:
    """The tokens of a text by the default model, counted among the requests of its key, and ended with its client.

    Raises:
        QuotaExceeded: the key has too many requests already.
        TercetError: as `PoolTokenizer.tokenize`.
    """
    caller = caller_of(req)
    with starter.counting(caller):
        return tokens_of(starter, tokenizer, caller, text, time.monotonic())


def _encode_texts(text: str, found: Tokens) -> bytes:
    """The answer with texts, part by part: a MiB has a token for each byte at most, and to encode them takes 0.1 s or
    more, during which no other thread would have the interpreter lock."""
    tokens = _text_tokens(text, found)
    parts = iter(lambda: list(islice(tokens, TOKENS_AT_ONCE)), [])
    return b"[" + b",".join(_encode(part)[1:-1] for part in parts) + b"]"


def _text_tokens(text: str, found: Tokens) -> Iterator[TextToken]:
    for id_, (start, stop) in zip(found.ids, pairwise(chain([0], found.ends)), strict=True):
        yield TextToken(id=id_, text=text[start:stop], start=start, stop=stop)
