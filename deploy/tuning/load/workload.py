"""The workload W, as a plain value that can be sent to another process.

Knows token counts and sampling parameters. Does not know who answers, and does not import torch.
"""

from __future__ import annotations

from typing import Any

import msgspec


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
