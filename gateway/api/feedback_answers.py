"""Remembers the recent answers of this process, for feedback that refers to them.

An answer is one integer, whose meaning `gateway.api.feedback` knows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

# Recent answers: ten minutes of a hundred writers who request at pauses, half a minute of as many who do at each key.
MAX_ANSWERS = 20_000
# Recent answers with an accepted sentence, on which `kept` is reported later: fifteen minutes of a hundred writers who
# accept one every five seconds.
MAX_ACCEPTED_ANSWERS = 20_000


class RecentAnswers:
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


def _add(answers: OrderedDict[int, int], key: int, answer: int, max_answers: int) -> None:
    answers[key] = answer
    if len(answers) > max_answers:
        answers.popitem(last=False)
