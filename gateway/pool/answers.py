"""What a worker may answer: bounds of a call's bytes and tokens, and the checks of every line.

A worker may be of another version, be compromised or have a fault, so nothing that it sends is used unchecked. The
bounds follow from the request: what exceeds them is no answer to it. Pure; knows neither HTTP nor what becomes of a
slot that sends such a thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from shared.metrics import COUNTERS
from shared.protocol import (
    ENGINE_FAILURES,
    FINISH_REASONS,
    MAX_TYPED_TOKENS,
    Done,
    GenerateRequest,
    State,
    Token,
    Tokens,
    Top,
)

# A `done` line without its lists is about 400 bytes; the rest is for fields that a newer worker may add.
BASE_BYTES = 1 << 14
# One token's text in JSON, or one of the likeliest tokens with its numbers: at most 300 bytes (`wire.MAX_LINE_BYTES`),
# and as many again for what its number, end and begin take, or for the rest of its `token` line.
TOKEN_BYTES = 600
# Each item of a tokenized text: its id, its end, and its text, of which each byte can take 6 bytes of JSON.
TOKENIZED_BYTES = 30
# Characters of a worker's sentence that are kept.
MAX_DETAIL_CHARS = 500
# Bytes of a character in UTF-8, at most, and as how many times as many a tokenizer that normalizes text may read them:
# NFC writes up to three for one, and a replacement in tokenizer.json as many as its author likes. A token has a byte at
# least.
MAX_CHAR_BYTES, MAX_GROWTH = 4, 64
# Tokens that a model's tokenizer may add to a prompt, such as the start of a text.
MAX_ADDED_TOKENS = 16
# Of each label of `shared.metrics.COUNTERS`. What a newer worker may count besides is UNKNOWN.
_COUNTER_LABELS: Mapping[str, frozenset[str]] = {
    "finish_reason": FINISH_REASONS | {"cancelled", "error"},
    "kind": ENGINE_FAILURES,
    "outcome": frozenset({"succeeded", "failed"}),
}
UNKNOWN = "unknown"


class InvalidAnswer(Exception):
    """A worker has sent what cannot be true. The text says what, and repeats nothing of it."""


class AnswerCheck:
    """Checks the lines of one answer to a `POST /generate`, in their order; removes from them what was not requested.

    Attributes:
        max_line_bytes, max_bytes: of a line, and of all lines.
    """

    __slots__ = (
        "_is_done",
        "_max_new",
        "_max_prompt",
        "_num_tokens",
        "_request",
        "_vocab_size",
        "max_bytes",
        "max_line_bytes",
    )

    def __init__(self, request: GenerateRequest, vocab_size: int) -> None:
        """
        Args:
            vocab_size: the model's; 0: unknown.
        """
        self._request = request
        self._vocab_size = vocab_size or 1 << 31
        self._max_new = request.sampling.max_new_tokens
        self._max_prompt = _max_prompt_tokens(request)
        self._num_tokens = 0
        self._is_done = False
        num_positions = self._max_new + MAX_TYPED_TOKENS + (self._max_prompt if request.echo else 0)
        # A position's share of the text; with log-probabilities its token by itself, the likeliest, and their names.
        num_texts = 1 + request.echo + (0 if request.logprobs is None else 2 + 2 * request.logprobs)
        self.max_line_bytes = BASE_BYTES + num_positions * num_texts * TOKEN_BYTES
        self.max_bytes = self.max_line_bytes * (2 if request.stream else 1)

    def token(self, line: Token) -> None:
        """
        Raises:
            InvalidAnswer: the line contradicts the request, or itself.
        """
        if self._is_done:
            raise InvalidAnswer("a line after the last")
        if not self._request.stream:
            raise InvalidAnswer("tokens that were not requested")
        self._check_score(line)
        self._num_tokens += 1
        if self._num_tokens > self._max_new:
            raise InvalidAnswer("more tokens than requested")
        if line.token_id >= self._vocab_size:
            raise InvalidAnswer("a token that the model does not have")
        if self._request.logprobs is None:
            line.token_text = line.begin = line.tops = line.names = None
            return
        if line.token_text is None or line.begin is None or line.tops is None:
            raise InvalidAnswer("not the scores that were requested")
        self._check_tops([line.tops])

    def done(self, line: Done) -> None:
        """
        Raises:
            InvalidAnswer: as `token`.
        """
        if self._is_done:
            raise InvalidAnswer("a line after the last")
        self._is_done = True
        self._check_score(line)
        ids = line.token_ids
        number = len(ids)
        if not self._request.score_prior:
            line.prior_logprobs = None
        if line.finish_reason not in FINISH_REASONS:
            raise InvalidAnswer("an unknown finish_reason")
        if not len(line.logprobs) == len(line.ends) == len(line.prior_logprobs or ids) == number:
            raise InvalidAnswer("lists of different lengths")
        if not line.num_typed_tokens <= line.num_kept_tokens <= number:
            raise InvalidAnswer("more tokens kept than generated")
        max_typed = MAX_TYPED_TOKENS if self._request.heal else 0
        if line.num_typed_tokens > max_typed or number - line.num_typed_tokens > self._max_new:
            raise InvalidAnswer("more tokens than requested")
        self._check_ids(ids)
        self._check_ends(line.ends, len(line.text))
        self._check_words(line)
        max_cached = line.num_prompt_tokens + MAX_TYPED_TOKENS + MAX_ADDED_TOKENS
        if line.num_prompt_tokens > self._max_prompt or line.cached_tokens > max_cached:
            raise InvalidAnswer("more tokens of the prompt than it has")
        self._check_scores(line)
        self._check_prompt(line)

    def _check_score(self, line: Token | Done) -> None:
        if not self._request.score_last:
            line.prompt_score = None

    def _check_scores(self, line: Done) -> None:
        if self._request.logprobs is None:
            line.token_texts = line.begins = line.tops = line.names = line.prompt_logprobs = line.prompt_tops = None
            return
        number = len(line.token_ids)
        texts, begins, tops = line.token_texts, line.begins, line.tops
        if texts is None or begins is None or tops is None:
            raise InvalidAnswer("not the scores that were requested")
        if not len(texts) == len(begins) == len(tops) == number:
            raise InvalidAnswer("lists of different lengths")
        if begins != sorted(begins):
            raise InvalidAnswer("tokens out of order")
        if begins and begins[-1] > sum(map(len, texts)):
            raise InvalidAnswer("a token beyond the text")
        self._check_tops(tops)

    def _check_prompt(self, line: Done) -> None:
        if not self._request.echo:
            line.prompt_text = line.prompt_ids = line.prompt_token_texts = line.prompt_ends = None
            line.prompt_logprobs = line.prompt_tops = None
            return
        text, ids = line.prompt_text, line.prompt_ids
        texts, ends = line.prompt_token_texts, line.prompt_ends
        if text is None or ids is None or texts is None or ends is None:
            raise InvalidAnswer("not the prompt that was requested")
        number = line.num_prompt_tokens
        if not len(ids) == len(texts) == len(ends) == number:
            raise InvalidAnswer("lists of different lengths")
        self._check_ids(ids)
        self._check_ends(ends, len(text))
        sent = self._request.prompt_ids
        if sent is not None and sent[max(0, len(sent) - number) :] != ids:
            raise InvalidAnswer("another prompt")
        logprobs, tops = line.prompt_logprobs, line.prompt_tops
        if (logprobs is None) != (tops is None):
            raise InvalidAnswer("scores of half a kind")
        if logprobs is not None and tops is not None:
            if not len(logprobs) == len(tops) == number:
                raise InvalidAnswer("lists of different lengths")
            if None in islice(logprobs, 1, None) or None in islice(tops, 1, None):
                raise InvalidAnswer("a token without a score")
            self._check_tops([top or [] for top in tops])

    def _check_ids(self, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self._vocab_size:
            raise InvalidAnswer("a token that the model does not have")

    def _check_ends(self, ends: list[int], num_chars: int) -> None:
        if ends != sorted(ends):
            raise InvalidAnswer("tokens out of order")
        if (ends[-1] if ends else 0) != num_chars:
            raise InvalidAnswer("another text than its tokens have")

    def _check_words(self, line: Done) -> None:
        ends = [word.end for word in line.words or ()]
        if ends and (self._request.predict is None or ends != sorted(ends) or ends[-1] > len(line.text)):
            raise InvalidAnswer("words that its text does not have")

    def _check_tops(self, tops: Sequence[Sequence[Top]]) -> None:
        limit = self._request.logprobs or 0
        if max(map(len, tops), default=0) > limit:
            raise InvalidAnswer("more likely tokens than requested")
        largest = max((top.token_id for each in tops for top in each), default=0)
        if largest >= self._vocab_size:
            raise InvalidAnswer("a token that the model does not have")


def _max_prompt_tokens(request: GenerateRequest) -> int:
    if request.prompt_ids is not None:
        number = len(request.prompt_ids)
    else:
        text = request.prompt or ""
        number = MAX_GROWTH * len(text) * (1 if text.isascii() else MAX_CHAR_BYTES)
    limit = number if request.max_prompt_tokens is None else request.max_prompt_tokens
    return min(number, limit) + MAX_ADDED_TOKENS


def max_tokenized_bytes(num_bytes: int) -> int:
    """Bound of the answer to a `POST /tokenize`.

    Args:
        num_bytes: of the text, at least, in UTF-8.
    """
    return BASE_BYTES + TOKENIZED_BYTES * MAX_GROWTH * num_bytes


def check_tokens(text: str, found: Tokens) -> None:
    """
    A tokenizer may drop the end of a text, or all of it.

    Raises:
        InvalidAnswer: these cannot be the tokens of the text.
    """
    if len(found.ids) != len(found.ends):
        raise InvalidAnswer("lists of different lengths")
    if found.ends != sorted(found.ends) or (found.ends and found.ends[-1] != len(text)):
        raise InvalidAnswer("another text than its tokens have")


def usable_state(state: State) -> State:
    """A state with known counters only, because their names become labels of metrics, and a reason of bounded length.

    Counts of kinds that this gateway does not know are added up as UNKNOWN; other unknown counters are left out.
    """
    counters: dict[str, float] = {}
    for key, count in state.counters.items():
        name, _, label = key.partition(".")
        if name not in COUNTERS:
            continue
        if (label_name := COUNTERS[name][1]) is None:
            key = name
        elif label not in _COUNTER_LABELS[label_name]:
            key = f"{name}.{UNKNOWN}"
        counters[key] = counters.get(key, 0.0) + count
    return msgspec.structs.replace(state, counters=counters, reason=state.reason and shortened(state.reason))


def shortened(text: str) -> str:
    """A worker's sentence, for logs and clients."""
    return text if len(text) <= MAX_DETAIL_CHARS else f"{text[:MAX_DETAIL_CHARS]}…"
