"""Where answers are remembered, for feedback that refers to them: in this gateway, and in its shared store.

An answer is one integer, whose meaning `gateway.api.feedback` knows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from gateway.shared_store.connection import SharedStore, SharedStoreAway
from gateway.shared_store.scripts import REPLACE_VALUE

# Recent answers: ten minutes of a hundred writers who request at pauses, half a minute of as many who do at each key.
MAX_ANSWERS = 20_000
# Recent answers with an accepted sentence, on which `kept` is reported later: fifteen minutes of a hundred writers who
# accept one every five seconds.
MAX_ACCEPTED_ANSWERS = 20_000
# In the shared store, whose owner bounds its memory.
ANSWER_TTL_S = 600
ACCEPTED_TTL_S = 900
# Attempts to change an answer that other gateways change too: each that fails is another's that succeeds.
MAX_ATTEMPTS = 10


class OwnAnswers:
    """The recent answers of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Answers by the hash of owner and id, which takes less memory than both. Python salts it, so no client can
        # choose an id that collides with an answer of another owner.
        self._answers: OrderedDict[int, int] = OrderedDict()
        # An answer moves here with the first acceptance, so that requests at each key do not displace it.
        self._accepted: OrderedDict[int, int] = OrderedDict()

    def add(self, owner: str, answer_id: str, answer: int) -> None:
        key = hash((owner, answer_id))
        with self._lock:
            self._accepted.pop(key, None)  # of an earlier answer with the same id, which a client may choose
            _add(self._answers, key, answer, MAX_ANSWERS)

    def change(
        self, owner: str, answer_id: str, change: Callable[[int], int], *, is_accepted: bool
    ) -> tuple[int, int] | None:
        """Replace an answer.

        Args:
            change: makes the new answer from the old one; what it raises is passed on, and nothing is replaced.
            is_accepted: the change is an acceptance.

        Returns:
            The answer before and after; None: it is not remembered.
        """
        key = hash((owner, answer_id))
        with self._lock:
            before = self._answers.get(key, self._accepted.get(key))
            if before is None:
                return None
            after = change(before)
            if key in self._accepted:
                self._accepted[key] = after
            elif is_accepted:
                del self._answers[key]
                _add(self._accepted, key, after, MAX_ACCEPTED_ANSWERS)
            else:
                self._answers[key] = after
        return before, after


class SharedAnswers:
    """The recent answers of all gateways with this store. Thread-safe."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._replace = store.script(REPLACE_VALUE)

    def add(self, owner: str, answer_id: str, answer: int) -> None:
        """Without the store, only this gateway will know the answer."""
        try:
            with self._store.using("feedback") as client:
                client.set(self._store.name("answer", owner, answer_id), answer, ex=ANSWER_TTL_S)
        except SharedStoreAway:
            return

    def change(self, owner: str, answer_id: str, change: Callable[[int], int]) -> tuple[int, int] | None:
        """As `OwnAnswers.change`; None also if the store cannot be used."""
        name = self._store.name("answer", owner, answer_id)
        try:
            with self._store.using("feedback") as client:
                for _ in range(MAX_ATTEMPTS):
                    if (data := client.get(name)) is None:
                        return None
                    before = int(data)
                    after = change(before)
                    if self._replace(keys=[name], args=[data, after, ACCEPTED_TTL_S], client=client):
                        return before, after
        except SharedStoreAway:
            pass
        return None


def _add(answers: OrderedDict[int, int], key: int, answer: int, max_answers: int) -> None:
    answers[key] = answer
    if len(answers) > max_answers:
        answers.popitem(last=False)
