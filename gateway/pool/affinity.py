"""Document affinity: which slot served a document last, and so has its prompt in the prefix cache.

A document is a number that the caller derives; this module knows no text. No lock: `Admission` holds its own.
"""

from __future__ import annotations

from collections import OrderedDict

# Documents remembered before the least recently used is dropped. A dropped one may be placed on another slot, which
# then computes its prompt once more.
MAX_DOCUMENTS = 10_000


class DocumentAffinity:
    """The last slot of each document: a map with least-recently-used eviction."""

    def __init__(self, max_documents: int = MAX_DOCUMENTS) -> None:
        self._max_documents = max_documents
        self._slots: OrderedDict[int, int] = OrderedDict()

    def slot_of(self, document: int | None) -> int | None:
        return None if document is None else self._slots.get(document)

    def remember(self, document: int | None, slot: int) -> None:
        """Note that a slot serves this document. `None`, a request without a document, is ignored."""
        if document is None:
            return
        self._slots[document] = slot
        self._slots.move_to_end(document)
        if len(self._slots) > self._max_documents:
            self._slots.popitem(last=False)
