"""Prompts of an exact number of tokens that no cache has seen. Knows a tokenizer; does not know who answers."""

from __future__ import annotations

import random
import re
from pathlib import Path

from workers.checkpoints.resolve import Checkpoint
from workers.text.tokenizer import Tokenizer


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
