"""Token healing: which tokens may come next where the text must begin with what was typed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenConstraint:
    """The tokens that can come next where the text must begin with certain bytes."""

    allowed: tuple[int, ...]
    if_likeliest: tuple[int, ...]  # allowed as well where the whole vocabulary has none likelier
    longer: frozenset[int]  # of both, those that say more than the bytes
    table: Any = field(init=False, compare=False)  # the first two as int32, for kernels

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", np.array(self.allowed + self.if_likeliest, np.int32))
