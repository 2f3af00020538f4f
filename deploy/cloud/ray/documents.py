"""Which worker remembers a document: rendezvous hashing, so that every process finds the same one without asking.

When the n-th worker comes or goes, 1/n of the documents change theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def preferred(key: str, names: Iterable[str]) -> str:
    """The name that remembers `key`: the one with the highest hash of both.

    Raises:
        ValueError: there are no names.
    """
    return max(names, key=lambda name: hashlib.blake2b(f"{key} {name}".encode(), digest_size=8).digest())
