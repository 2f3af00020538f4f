"""The workload W and the model under test, as plain values that can be sent to another process.

Knows token counts and sampling parameters. Does not know who answers, and does not import torch.
"""

from __future__ import annotations

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


class Subject(msgspec.Struct, frozen=True):
    """The model under test."""

    name: str
    source: str  # hub, directory, embedded or synthetic
    directory: str
    n_ctx: int
    vocab_size: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Subject:
        return cls(*(getattr(checkpoint, name) for name in cls.__struct_fields__))

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. A synthetic model has the directory of the tokenizer that it borrows."""
        return Tokenizer.from_directory(Path(self.directory), self.vocab_size)
