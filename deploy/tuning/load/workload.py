"""The workload W, and prompts of an exact number of tokens that no cache has seen.

Knows token counts, a tokenizer and sampling parameters. Does not know who answers, and does not import torch.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec

from workers.checkpoints.resolve import Checkpoint
from workers.text.tokenizer import Tokenizer


class Workload(msgspec.Struct, frozen=True):
    """Size and sampling parameters of one request. The defaults are W, which most figures refer to.

    W is one autocompletion request: a 64-token prompt and three branches of 20 new tokens each. The branches share the
    prompt: one prefill yields the first token of each, then 19 decode steps of three rows yield the other tokens.
    """

    num_prompt_tokens: int = 64
    num_samples: int = 3
    num_new_tokens: int = 20
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.95

    def body(self, context: str, seed: int, **more: Any) -> dict[str, Any]:
        """The body of `POST /autocomplete`."""
        return {
            "context": context,
            "n_samples": self.num_samples,
            "length": self.num_new_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": seed,
            **more,
        }


W = Workload()


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """A model's tokenizer. A synthetic model has the directory of the tokenizer that it borrows."""
    return Tokenizer.from_directory(Path(checkpoint.directory), checkpoint.vocab_size)


class PromptGenerator:
    """Draws meaningless prose from a tokenizer's ordinary words, each of which is one token."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        """
        Raises:
            ValueError: the tokenizer has too few ordinary words.
        """
        self._tokenizer = tokenizer = tokenizer_of(checkpoint)
        self._random = random.Random(seed)
        self._words: list[str] = []  # " word"
        self._openings: list[str] = []  # "word": one token without the space as well
        for token_id in range(tokenizer.vocab_size):
            text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            if re.fullmatch(r" [a-z]{2,12}", text) and tokenizer.encode(text) == [token_id]:
                self._words.append(text)
                if len(tokenizer.encode(text[1:])) == 1:
                    self._openings.append(text[1:])
        if len(self._words) < 100 or len(self._openings) < 10:
            raise ValueError("the tokenizer has too few ordinary words for prompts")

    def text(self, num_tokens: int) -> str:
        """A text of exactly `num_tokens` tokens; practically never the same text twice."""
        return self._random.choice(self._openings) + "".join(self._random.choices(self._words, k=num_tokens - 1))

    def word(self, num_letters: int) -> str:
        """A word of at least so many letters, with the space before it."""
        return self._random.choice([word for word in self._words if len(word) > num_letters])

    def document(self, num_words: int) -> list[str]:
        """Words of a document: a third have two tokens or more, every twelfth ends a sentence."""
        words = []
        for index in range(num_words):
            word = self._random.choice(self._words)
            if self._random.random() < 1 / 3:
                word += self._random.choice(self._words)[1:]
            words.append(word[index == 0 :] + ("." if index % 12 == 11 else ""))
        return words

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        """The token ids of such a text."""
        return tuple(self._tokenizer.encode(self.text(num_tokens)))

    def seed(self) -> int:
        """A request's seed."""
        return self._random.randrange(2**31)
