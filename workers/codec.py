"""Text to token ids and back, for one model: a protocol request becomes an engine request, its output protocol lines.

Knows the protocol's values and the tokenizer. Does not know HTTP, the engine's thread or the device.
"""

from __future__ import annotations

import codecs
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Any, TypeAlias

from msgspec.structs import asdict

from shared.errors import InvalidRequest, PromptTooLong
from shared.protocol import Done, Failed, GenerateRequest, Token, TokenizeResponse, Top
from shared.sampling import Sampling
from shared.text import SUFFIX_ROOM
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams, SequenceOutput, TopLogprobs
from workers.text.detokenizer import CharacterIndex, Detokenizer
from workers.text.token_healing import TokenHealing
from workers.text.tokenizer import Tokenizer
from workers.text.window import encode_window

# Requests whose branches arrive at the same time. A request's last branch comes within milliseconds of its first.
MAX_ENCODED_PROMPTS = 32
# Of the bytes of a token: a small letter, or a character that is not ASCII.
_HAS_WORD = re.compile(rb"[a-z\x80-\xff]")

# The prompt's token ids; with token healing the typed bytes that the output must begin with, and their token ids.
_EncodedPrompt: TypeAlias = tuple[tuple[int, ...], bytes, tuple[int, ...]]


class Codec:
    """Encodes requests and decodes outputs of one model. Thread-safe."""

    def __init__(self, healing: TokenHealing, n_ctx: int) -> None:
        """
        Args:
            n_ctx: the model's context size in tokens.
        """
        self._healing = healing
        self.tokenizer = healing.tokenizer
        self._n_ctx = n_ctx
        self._lock = threading.Lock()
        self._encoded: dict[object, _EncodedPrompt] = {}  # in the order in which they were encoded

    def request(self, request: GenerateRequest, now: float) -> EngineRequest:
        """The engine's form of `request`.

        Args:
            now: when the request arrived, in seconds of `time.monotonic()`; its deadline counts from there.

        Raises:
            InvalidRequest: not exactly one of text and ids was sent, or the text has a token that the model lacks.
            PromptTooLong: the text has more tokens than the model's context, whatever they are.
        """
        if (request.prompt is None) == (request.prompt_ids is None):
            raise InvalidRequest("Send one of prompt and prompt_ids.")
        prompt_ids, typed, forced_ids = self._encode_prompt(request)
        return EngineRequest(
            prompt_ids=prompt_ids,
            sampling=_sampling_params(request.sampling, request.logprobs or 0),
            seed=request.seed,
            forced_prefix=typed,
            forced_ids=forced_ids,
            deadline=now + request.deadline_ms / 1e3,
            group_size=request.group.size if request.group else 1,
            cache_scope=(request.owner, request.session),
            # A prompt that is only scored has no token to deliver.
            stream=request.stream and request.sampling.max_new_tokens > 0,
            echo_logprobs=request.echo and request.logprobs is not None,
        )

    def tokenize(
        self,
        text: str,
        *,
        special_as_text: bool = False,
        after_part: Callable[[], None] | None = None,
        is_prompt: bool = True,
    ) -> TokenizeResponse:
        """The tokens of `text`, as those of a prompt.

        Args:
            after_part: as for `Tokenizer.encode_with_starts`.
            is_prompt: with those that the tokenizer adds before and after a prompt.
        """
        tokenizer = self.tokenizer
        encode = partial(tokenizer.encode_with_starts, special_as_text=special_as_text)
        ids, starts = encode(text) if after_part is None else encode(text, after_part=after_part)
        before, after = (tokenizer.before_ids, tokenizer.after_ids) if is_prompt else ((), ())
        ends = [*starts[1:], len(text)] if ids else []
        ids, ends = [*before, *ids, *after], [*(0 for _ in before), *ends, *(len(text) for _ in after)]
        ends[-1:] = [len(text)] if ends else []  # also of a text that the tokenizer drops
        start_id = next(iter(tokenizer.before_ids), tokenizer.start_id)
        return TokenizeResponse(
            ids=ids,
            texts=[tokenizer.text_of(id_) for id_ in ids],
            ends=ends,
            n_ctx=self._n_ctx,
            eos_id=tokenizer.eos_id or 0,
            eos_token=tokenizer.text_of(tokenizer.eos_id or 0),
            bos_token=tokenizer.text_of(start_id or 0),
            num_before=len(before),
            num_after=len(after),
        )

    def lacks(self, ids: Sequence[int]) -> bool:
        """Whether the tokenizer has a token of `ids` and the model lacks it."""
        return bool(ids) and max(ids) >= self.tokenizer.vocab_size

    def prompt_end(self, request: GenerateRequest) -> str:
        """The last character of the prompt's text; empty if there is none."""
        if request.prompt_ids:
            return self.tokenizer.text_of(request.prompt_ids[-1])[-1:]
        return (request.prompt or "")[-1:]

    def word_logprob(
        self, ids: Sequence[int], logprobs: Sequence[float], lowest: float, min_tokens: int
    ) -> float | None:
        """The mean log-probability of the characters of words. Capitals, numbers and marks say little about a language.

        Args:
            ids: of tokens of a prompt.
            logprobs: of each token.
            lowest: of a character: one that is less likely counts as this.
            min_tokens: None if fewer tokens have such characters.
        """
        index = CharacterIndex()
        texts = [self.tokenizer.prompt_bytes(id_) for id_ in ids]
        begins = [index.feed(text) for text in texts]
        total = pending = 0.0  # pending: of tokens that are parts of a character
        num_chars = num_tokens = 0
        for text, begin, end, logprob in zip(texts, begins, [*begins[1:], index.num_chars], logprobs, strict=True):
            if not _HAS_WORD.search(text):
                continue
            num_tokens += 1
            pending += logprob
            if end > begin:
                total += max(pending, lowest * (end - begin))
                num_chars += end - begin
                pending = 0.0
        return total / max(1, num_chars) if num_tokens >= min_tokens else None

    def token_stream(self, request: GenerateRequest, engine_request: EngineRequest) -> TokenStream:
        """The converter for one streamed sequence, token by token."""
        return TokenStream(
            self.tokenizer,
            self._detokenizer(engine_request),
            num_forced_bytes=len(engine_request.forced_prefix),
            begins=None if request.logprobs is None else TokenBegins(self.tokenizer, engine_request),
        )

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
        scores = {} if request.logprobs is None else self._scores(engine_request, output)
        echo = self._echo(request, engine_request, output) if request.echo else {}
        if scores:
            tops = chain(scores["tops"], (top or [] for top in echo.get("prompt_tops") or []))
            others = (top.token_id for top in chain.from_iterable(tops))
            ids = chain(output.token_ids, echo.get("prompt_ids", ()), others)
            scores["names"] = self.tokenizer.names_of(ids) or None
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
            **scores,
            **echo,
        )

    def _scores(self, request: EngineRequest, output: SequenceOutput) -> dict[str, Any]:
        """The fields of `Done` that describe the generated tokens."""
        tokenizer, begins = self.tokenizer, TokenBegins(self.tokenizer, request)
        return {
            "token_texts": [tokenizer.text_of(token) for token in output.token_ids],
            "begins": [begins.feed(token) for token in output.token_ids],
            "tops": self._tops(output.tops or [()] * len(output.token_ids)),
        }

    def _echo(self, sent: GenerateRequest, request: EngineRequest, output: SequenceOutput) -> dict[str, Any]:
        """The fields of `Done` that describe the prompt."""
        tokenizer, ids = self.tokenizer, request.prompt_ids
        parts = [tokenizer.prompt_bytes(token) for token in ids]
        if sent.prompt is not None:  # what was added to a text is no part of it
            num_after = 0 if request.forced_prefix else len(tokenizer.after_ids)
            own = range(len(tokenizer.before_ids), len(ids) - num_after)
            parts = [part if index in own else b"" for index, part in enumerate(parts)]
        index = CharacterIndex()
        begins = [index.feed(part) for part in parts]
        fields: dict[str, Any] = {
            # Without an incomplete character at the end.
            "prompt_text": codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(parts)),
            "prompt_ids": list(ids),
            "prompt_token_texts": [tokenizer.text_of(token) for token in ids],
            "prompt_ends": [*begins[1:], index.num_chars][: len(ids)],
        }
        if request.echo_logprobs and len(output.prompt_logprobs) == len(ids):
            fields["prompt_logprobs"] = list(output.prompt_logprobs)
            fields["prompt_tops"] = [None if top is None else self._tops([top])[0] for top in output.prompt_tops]
        return fields

    def _tops(self, tops: Iterable[TopLogprobs]) -> list[list[Top]]:
        text_of = self.tokenizer.text_of
        return [[Top(token, text_of(token), logprob) for token, logprob in top] for top in tops]

    def _detokenizer(self, request: EngineRequest) -> Detokenizer:
        sampling = request.sampling
        return Detokenizer(
            self.tokenizer,
            sampling.stop,
            single_line=sampling.single_line,
            num_forced_bytes=len(request.forced_prefix),
        )

    def _encode_prompt(self, request: GenerateRequest) -> _EncodedPrompt:
        if request.prompt_ids is not None:
            limit = request.max_prompt_tokens
            return tuple(request.prompt_ids[-limit:] if limit else request.prompt_ids), b"", ()
        num_new = request.sampling.max_new_tokens + (SUFFIX_ROOM if request.suffix else 0)
        args = request.prompt or "", request.max_prompt_tokens, num_new, request.heal, request.special_as_text
        # Scoped like the prefix cache: whether a prompt was encoded before shows in the time that it takes.
        key = args, request.owner, request.session
        with self._lock:  # the branches of a request arrive together: the first encodes for all
            encoded = self._encoded.get(key)
            if encoded is None:
                encoded = self._encoded[key] = self._encode(*args)
                if len(self._encoded) > MAX_ENCODED_PROMPTS:
                    del self._encoded[next(iter(self._encoded))]
            return encoded

    def _encode(
        self, text: str, max_tokens: int | None, num_new: int, is_healed: bool, special_as_text: bool
    ) -> _EncodedPrompt:
        tokenizer, typed = self.tokenizer, b""
        if is_healed:
            begin = 0 if special_as_text else tokenizer.special_end(text)
            rest, typed = self._healing.split(text[begin:])
            text = text[:begin] + rest
        forced_ids = self._known(tuple(tokenizer.encode(typed.decode(), special_as_text=True)) if typed else ())
        before, after = tokenizer.before_ids, () if typed else tokenizer.after_ids
        encode = partial(tokenizer.encode_with_starts, special_as_text=special_as_text)
        if max_tokens is None:
            if len(text.encode("utf-8", "replace")) > self._n_ctx * tokenizer.max_token_bytes:
                generated = f", and max_new_tokens ({num_new}) must fit too" if num_new else ""
                raise PromptTooLong(
                    f"Too many tokens: the prompt alone has more than the model's context (n_ctx: {self._n_ctx})"
                    f"{generated}; shorten the prompt, or send max_prompt_tokens."
                )
            return self._known((*before, *encode(text)[0], *after)), typed, forced_ids
        # The forced prefix can take as many tokens as it has bytes.
        room = min(max_tokens, self._n_ctx - num_new - len(typed)) - len(before) - len(after)
        ids = encode_window(text, room, encode) if room > 0 else []
        return self._known((*before, *ids, *after)), typed, forced_ids

    def _known(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """`ids`, if the model has them all."""
        if self.lacks(ids):
            raise InvalidRequest(
                f"The prompt has a token that the model lacks: its tokenizer gives the id {max(ids)}, and the model's "
                f"ids end at {self.tokenizer.vocab_size - 1}. Leave that text out."
            )
        return ids


@lru_cache(maxsize=256)  # branches of a request, and most requests, have the same
def _sampling_params(sampling: Sampling, top_logprobs: int) -> SamplingParams:
    return SamplingParams(**asdict(sampling), top_logprobs=top_logprobs)


class TokenBegins:
    """Finds where the tokens of one sequence begin in its text, whether a stop string removes them or not."""

    def __init__(self, tokenizer: Tokenizer, request: EngineRequest) -> None:
        self._tokenizer = tokenizer
        self._index = CharacterIndex()
        self._num_forced_bytes = len(request.forced_prefix)  # still to come

    def feed(self, token_id: int) -> int:
        data = self._tokenizer.token_bytes(token_id)
        begin = self._index.feed(data[self._num_forced_bytes :])
        self._num_forced_bytes = max(0, self._num_forced_bytes - len(data))
        return begin


class TokenStream:
    """Converts one sequence's tokens to the protocol's lines."""

    def __init__(
        self, tokenizer: Tokenizer, detokenizer: Detokenizer, *, num_forced_bytes: int, begins: TokenBegins | None
    ) -> None:
        """
        Args:
            begins: None if no log-probabilities are requested.
        """
        self._tokenizer = tokenizer
        self._begins = begins
        self._detokenizer = detokenizer
        self._num_forced_bytes = num_forced_bytes  # not generated yet

    def feed(self, token: GeneratedToken) -> Token | None:
        """The token's line, or None if all of its bytes repeat what was typed (token healing)."""
        text = self._detokenizer.feed(token.token_id)
        begin = None if self._begins is None else self._begins.feed(token.token_id)
        self._num_forced_bytes -= len(self._tokenizer.token_bytes(token.token_id))
        if self._num_forced_bytes >= 0:
            return None
        line = Token(text=text, token_id=token.token_id, logprob=token.logprob)
        if begin is not None:
            text_of = self._tokenizer.text_of
            line.token_text, line.begin = text_of(token.token_id), begin
            line.tops = [Top(id_, text_of(id_), logprob) for id_, logprob in token.top]
            line.names = self._tokenizer.names_of([token.token_id, *(id_ for id_, _ in token.top)]) or None
        return line
