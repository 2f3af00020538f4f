"""What counts as two branches that begin alike."""

from __future__ import annotations

import pytest

from deploy.bench.quality.duplicates import share_of_duplicates

REQUESTS = [
    [" the sea was", " the sea is", " a boat"],
    [" the sea was", " the sea  was", " a"],
    [" one", " two", " three"],
    ["", " one", " two"],
]


@pytest.mark.parametrize(("num_words", "share"), [(None, 0.25), (1, 0.5), (2, 0.5), (3, 0.25)])
def test_requests_with_two_texts_that_begin_with_the_same_words_count(num_words: int | None, share: float) -> None:
    assert share_of_duplicates(REQUESTS, num_words) == share
