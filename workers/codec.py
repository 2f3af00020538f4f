"""Between the wire's texts and the engine's token ids: what is asked becomes a sequence, what came of it an answer.

Knows the wire's values and the tokenizer. Refuses to know HTTP and the device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import accumulate
from typing import TypeAlias

from shared.errors import InvalidRequest
from shared.protocol import Done, Failed, GenerateRequest, Token, Top
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams, SequenceOutput
from workers.text.detokenizer import Detokenizer
from workers.text.tokenizer import Tokenizer
from workers.text.window import encode_window

_Prompt: TypeAlias = tuple[tuple[int, ...], bytes, tuple[int, ...]]


class Codec:
    """One model's. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, n_ctx: int) -> None:
        self._tokenizer = tokenizer
        self._n_ctx = n_ctx
        self._lock = threading.Lock()
        self._last_encoded: tuple[object, _Prompt] = (None, ((), b"", ()))

    def request(self, ask: GenerateRequest, now: float) -> EngineRequest:
        """What the engine is asked.

        Args:
            now: `time.monotonic()` seconds.

        Raises:
            InvalidRequest: neither text nor token ids were sent, or both.
        """
        if (ask.prompt is None) == (ask.prompt_ids is None):
            raise InvalidRequest("Send one of prompt and prompt_ids.")
        prompt_ids, typed, forced_ids = self._prompt(ask)
        sampling = ask.sampling
        return EngineRequest(
            prompt_ids=prompt_ids,
            sampling=SamplingParams(
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                repetition_penalty=sampling.repetition_penalty,
                stop=sampling.stop,
                single_line=sampling.single_line,
                first_rank=sampling.first_rank,
                top_logprobs=ask.logprobs or 0,
            ),
            seed=ask.seed,
            forced_prefix=typed,
            forced_ids=forced_ids,
            deadline=now + ask.deadline_ms / 1e3,
            group=(ask.group.id, ask.group.size) if ask.group else None,
            stream=ask.stream,
            echo_logprobs=ask.echo and ask.logprobs is not None,
        )

    def tokens(self, request: EngineRequest) -> Tokens:
        """For the steps of a streamed sequence."""
        return Tokens(self._tokenizer, self._detokenizer(request), len(request.forced_prefix))

    def last_line(self, ask: GenerateRequest, request: EngineRequest, finished: SequenceOutput) -> Done | Failed:
        """The answer, as it is when the sequence has ended."""
        if finished.finish_reason == "error":
            return Failed(code="engine_error", detail=finished.error or "The engine failed.")
        detokenizer = self._detokenizer(request)
        pieces = [detokenizer.feed(token) for token in finished.token_ids]
        ends = list(accumulate(map(len, pieces)))
        rest = detokenizer.finish()
        if rest:
            ends[-1] += len(rest)
        text_of = self._tokenizer.text_of
        return Done(
            text="".join([*pieces, rest]),
            token_ids=list(finished.token_ids),
            logprobs=list(finished.logprobs),
            ends=ends,
            num_kept_tokens=finished.num_kept,
            num_typed_tokens=finished.num_forced,
            finish_reason=finished.finish_reason,
            num_prompt_tokens=len(request.prompt_ids),
            cached_tokens=finished.cached_tokens,
            queue_ms=finished.queue_ms,
            prefill_ms=finished.prefill_ms,
            decode_ms=finished.decode_ms,
            prompt_ids=list(request.prompt_ids) if ask.echo else None,
            prompt_logprobs=list(finished.prompt_logprobs) if finished.prompt_logprobs else None,
            token_texts=None if ask.logprobs is None else [text_of(token) for token in finished.token_ids],
            tops=[[Top(token, text_of(token), logprob) for token, logprob in top] for top in finished.tops]
            if finished.tops
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

    def _prompt(self, ask: GenerateRequest) -> _Prompt:
        """The prompt's token ids, what the text must begin with, and the ids of that."""
        if ask.prompt_ids is not None:
            most = ask.max_prompt_tokens
            return tuple(ask.prompt_ids[-most:] if most else ask.prompt_ids), b"", ()
        key = (ask.prompt or "", ask.max_prompt_tokens, ask.sampling.max_new_tokens, ask.heal)
        with self._lock:  # siblings come together: the first encodes for all
            if self._last_encoded[0] != key:
                self._last_encoded = (key, self._encode(*key))
            return self._last_encoded[1]

    def _encode(self, text: str, max_tokens: int | None, num_new: int, is_healed: bool) -> _Prompt:
        tokenizer = self._tokenizer
        typed = b""
        if is_healed:
            text, typed = tokenizer.healing.split(text)
        forced_ids = tuple(tokenizer.encode(typed.decode()))
        if max_tokens is None:
            return tuple(tokenizer.encode(text)), typed, forced_ids
        # Typed text can take as many tokens as it has bytes.
        room = self._n_ctx - num_new - len(typed)
        if room < 1:
            return (), typed, forced_ids
        return tuple(encode_window(text, min(max_tokens, room), tokenizer.encode_with_starts)), typed, forced_ids


class Tokens:
    """A sequence's steps become the wire's lines."""

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer, num_forced_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._num_typed_bytes = num_forced_bytes  # still to be said again

    def feed(self, step: GeneratedToken) -> Iterator[Token]:
        """The step's line, unless it says nothing that was not typed already."""
        text = self._detokenizer.feed(step.token_id)
        self._num_typed_bytes -= len(self._tokenizer.token_bytes(step.token_id))
        if self._num_typed_bytes < 0:
            yield Token(text=text, token_id=step.token_id, logprob=step.logprob)
