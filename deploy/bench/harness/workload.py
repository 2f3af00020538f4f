"""What is asked: the workload W, and prompts that nobody has seen before, of exactly so many tokens.

Knows words and token counts. Refuses to know who answers. Does not import torch.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec

from workers.checkpoints.resolve import Checkpoint
from workers.text.tokenizer import Tokenizer


class Pass(msgspec.Struct, frozen=True):
    """All linear layers of the model, `times` times: the blocks' over `rows` rows, the head over `head_rows`."""

    rows: int
    head_rows: int
    times: int


class Workload(msgspec.Struct, frozen=True):
    """One request's size and sampling. Defaults: W, "64-token prompt, 3 × 20 new tokens"."""

    num_prompt_tokens: int = 64
    num_samples: int = 3
    num_new_tokens: int = 20
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.95

    @property
    def num_steps(self) -> int:
        """Decode steps: the first new token comes from the prompt's own pass."""
        return self.num_new_tokens - 1

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

    def passes(self, num_requests: int = 1) -> list[Pass]:
        """The linear layers of that many requests at once: each prompt by itself, the decode steps together.

        Siblings share their prompt's pass, and the head is needed for a prompt's last row only.
        """
        return [Pass(self.num_prompt_tokens, 1, num_requests), *self.step_passes(num_requests)]

    def step_passes(self, num_requests: int = 1) -> list[Pass]:
        """The linear layers of the decode steps alone."""
        rows = self.num_samples * num_requests
        return [Pass(rows, rows, self.num_steps)]


W = Workload()

# The others' ways to answer W; `deploy.bench.speed.baselines` runs them.
BASELINES = {
    "a": "(a) the seed: 3 sequential generate calls, fp32",
    "a-bf16": "(a) the seed: 3 sequential generate calls, bf16",
    "b-fp32": "(b) generate(num_return_sequences=3), fp32",
    "b-bf16": "(b) generate(num_return_sequences=3), bf16",
    "static": "generate(num_return_sequences=3), static cache + compile, bf16",
    "continuous": "generate_batch: transformers' continuous batching, bf16",
}


class Run(msgspec.Struct, frozen=True):
    """One request's time from the first `submit` to the last `result`, and what its siblings had in common."""

    wall_ms: float
    cached_tokens: int  # the least of any sibling's
    ms_per_step: float  # mean over its decode steps, the median sibling


class Subject(msgspec.Struct, frozen=True):
    """The model under test, as plain values that a child process can be sent."""

    name: str
    source: str  # hub, directory, embedded or synthetic
    directory: str
    n_ctx: int
    vocab_size: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Subject:
        """
        Args:
            checkpoint: one that `workers.checkpoints.resolve` found on this machine.
        """
        return cls(*(getattr(checkpoint, name) for name in cls.__struct_fields__))

    def tokenizer(self) -> Tokenizer:
        """The model's own; a synthetic model's directory holds the one it borrows."""
        return Tokenizer.from_directory(Path(self.directory), self.vocab_size)


class Writer:
    """Endless prose without meaning, from a tokenizer's own words: each costs one token, none is rare or odd."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        """
        Raises:
            ValueError: the tokenizer has too few words to write with.
        """
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._words: list[str] = []  # " word"
        self._openings: list[str] = []  # "word", one token without its space too
        for token_id in range(tokenizer.vocab_size):
            text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            if re.fullmatch(r" [a-z]{2,12}", text) and tokenizer.encode(text) == [token_id]:
                self._words.append(text)
                if len(tokenizer.encode(text[1:])) == 1:
                    self._openings.append(text[1:])
        if len(self._words) < 100 or len(self._openings) < 10:
            raise ValueError("the tokenizer has too few ordinary words to write prompts with")

    def text(self, num_tokens: int) -> str:
        """A text of exactly `num_tokens` tokens; two calls never give the same one, but for chance."""
        return self._random.choice(self._openings) + "".join(self._random.choices(self._words, k=num_tokens - 1))

    def keystrokes(self, num_keys: int) -> list[str]:
        """The beginnings of one more word, letter by letter: " t", " th", " the"."""
        word = self._random.choice([word for word in self._words if len(word) > num_keys])
        return [word[: 2 + index] for index in range(num_keys)]

    def document(self, num_words: int) -> list[str]:
        """Words to be typed one after another; a third take two tokens or more, every twelfth ends a sentence."""
        words = []
        for index in range(num_words):
            word = self._random.choice(self._words)
            if self._random.random() < 1 / 3:
                word += self._random.choice(self._words)[1:]
            words.append(word[index == 0 :] + ("." if index % 12 == 11 else ""))
        return words

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        """Token ids of such a text."""
        return tuple(self._tokenizer.encode(self.text(num_tokens)))

    def seed(self) -> int:
        return self._random.randrange(2**31)
