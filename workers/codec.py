"""Text to token ids and back, for one model: a protocol request becomes an engine request, its output protocol lines.

Knows the protocol's values and the tokenizer. Does not know HTTP, the engine's thread or the device.
"""

from __future__ import annotations

import threading
from itertools import accumulate
from typing import TypeAlias

from msgspec.structs import asdict

from shared.errors import InvalidRequest
from shared.protocol import Done, Failed, GenerateRequest, Token, Top
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams, SequenceOutput
from workers.text.detokenizer import Detokenizer
from workers.text.tokenizer import Tokenizer
from workers.text.window import encode_window

# The prompt's token ids; with token healing the typed bytes that the output must begin with, and their token ids.
_EncodedPrompt: TypeAlias = tuple[tuple[int, ...], bytes, tuple[int, ...]]


class Codec:
    """Encodes requests and decodes outputs of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, n_ctx: int) -> None:
        """
        Args:
            n_ctx: the model's context size in tokens.
        """
        self._tokenizer = tokenizer
        self._n_ctx = n_ctx
        self._lock = threading.Lock()
        self._last_encoded: tuple[object, _EncodedPrompt] = (None, ((), b"", ()))

    def request(self, request: GenerateRequest, now: float) -> EngineRequest:
        """The engine's form of `request`.

        Args:
            now: when the request arrived, in seconds of `time.monotonic()`; its deadline counts from there.

        Raises:
            InvalidRequest: not exactly one of text and token ids was sent.
        """
        if (request.prompt is None) == (request.prompt_ids is None):
            raise InvalidRequest("Send one of prompt and prompt_ids.")
        prompt_ids, typed, forced_ids = self._encode_prompt(request)
        return EngineRequest(
            prompt_ids=prompt_ids,
            # The protocol gives a parameter the name that it has in the engine.
            sampling=SamplingParams(**asdict(request.sampling), top_logprobs=request.logprobs or 0),
            seed=request.seed,
            forced_prefix=typed,
            forced_ids=forced_ids,
            deadline=now + request.deadline_ms / 1e3,
            group_size=request.group.size if request.group else 1,
            cache_scope=(request.owner, request.session),
            stream=request.stream,
            echo_logprobs=request.echo and request.logprobs is not None,
        )

    def token_stream(self, request: EngineRequest) -> TokenStream:
        """The converter for one streamed sequence, token by token."""
        return TokenStream(self._tokenizer, self._detokenizer(request), len(request.forced_prefix))

    def last_line(
        self, request: GenerateRequest, engine_request: EngineRequest, output: SequenceOutput
    ) -> Done | Failed:
        """The protocol's last line for a finished sequence. It repeats the whole text, also of a streamed sequence."""
        if output.failure is not None:
            return Failed(code=output.failure.kind, detail=output.failure.detail)
        detokenizer = self._detokenizer(engine_request)
        deltas = [detokenizer.feed(token) for token in output.token_ids]
        ends = list(accumulate(map(len, deltas)))
        rest = detokenizer.finish()
        if rest:
            ends[-1] += len(rest)
        text_of = self._tokenizer.text_of
        return Done(
            text="".join([*deltas, rest]),
            token_ids=list(output.token_ids),
            logprobs=list(output.logprobs),
            ends=ends,
            num_kept_tokens=output.num_kept,
            num_typed_tokens=output.num_forced,
            finish_reason=output.finish_reason,
            num_prompt_tokens=len(engine_request.prompt_ids),
            cached_tokens=output.cached_tokens,
            queue_ms=output.queue_ms,
            prefill_ms=output.prefill_ms,
            decode_ms=output.decode_ms,
            prompt_ids=list(engine_request.prompt_ids) if request.echo else None,
            prompt_logprobs=list(output.prompt_logprobs) if output.prompt_logprobs else None,
            token_texts=None if request.logprobs is None else [text_of(token) for token in output.token_ids],
            tops=[[Top(token, text_of(token), logprob) for token, logprob in top] for top in output.tops]
            if output.tops
            else None,
        )

    def _detokenizer(self, request: EngineRequest) -> Detokenizer:
        sampling = request.sampling
        return Detokenizer(
            self._tokenizer,
            sampling.stop,
            single_line=sampling.single_line,
            num_forced_bytes=len(request.forced_prefix),
        )

    def _encode_prompt(self, request: GenerateRequest) -> _EncodedPrompt:
        if request.prompt_ids is not None:
            limit = request.max_prompt_tokens
            return tuple(request.prompt_ids[-limit:] if limit else request.prompt_ids), b"", ()
        args = request.prompt or "", request.max_prompt_tokens, request.sampling.max_new_tokens, request.heal
        # Scoped like the prefix cache: whether a prompt was encoded before shows in the time that it takes.
        key = args, request.owner, request.session
        with self._lock:  # the branches of a request arrive together: the first encodes for all
            if self._last_encoded[0] != key:
                self._last_encoded = (key, self._encode(*args))
            return self._last_encoded[1]

    def _encode(self, text: str, max_tokens: int | None, num_new: int, is_healed: bool) -> _EncodedPrompt:
        tokenizer = self._tokenizer
        typed = b""
        if is_healed:
            text, typed = tokenizer.healing.split(text)
        forced_ids = tuple(tokenizer.encode(typed.decode()))
        if max_tokens is None:
            return tuple(tokenizer.encode(text)), typed, forced_ids
        # The forced prefix can take as many tokens as it has bytes.
        room = self._n_ctx - num_new - len(typed)
        if room < 1:
            return (), typed, forced_ids
        return tuple(encode_window(text, min(max_tokens, room), tokenizer.encode_with_starts)), typed, forced_ids


class TokenStream:
    """Converts one sequence's tokens to the protocol's lines."""

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer, num_forced_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._num_forced_bytes = num_forced_bytes  # not generated yet

    def feed(self, token: GeneratedToken) -> Token | None:
        """The token's line, or None if all of its bytes repeat what was typed (token healing)."""
        text = self._detokenizer.feed(token.token_id)
        self._num_forced_bytes -= len(self._tokenizer.token_bytes(token.token_id))
        if self._num_forced_bytes >= 0:
            return None
        return Token(text=text, token_id=token.token_id, logprob=token.logprob)
