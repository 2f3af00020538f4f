"""The sampling parameters of one sequence, as the internal protocol sends them and the engine takes them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class Sampling(Struct, frozen=True, omit_defaults=True):
    """Defaults and ranges are those of the public schema; a value from outside is checked where it is decoded."""

    max_new_tokens: Annotated[int, Meta(ge=0)] = 20  # 0: the prompt is computed, for its scores, and nothing generated
    temperature: Annotated[float, Meta(ge=0)] = 1.0  # 0 is greedy
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 50  # 0 disables
    top_p: Annotated[float, Meta(ge=0, le=1)] = 0.95  # 0 and 1 disable
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0  # 0 disables
    typical_p: Annotated[float, Meta(ge=0, le=1)] = 1.0  # 0 and 1 disable
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0  # 1 disables
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # 0 disables
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # 0 disables
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), each id once
    stop: tuple[str, ...] = ()
    single_line: bool = False  # a line break is a stop string
    first_rank: Annotated[int, Meta(ge=0)] = 0  # greedy: the first token with new text is the one with this rank
