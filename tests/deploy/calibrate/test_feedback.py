"""The threshold from the metrics of a real feedback store."""

from __future__ import annotations

import pytest

from deploy.calibrate.feedback import MIN_KEPT_REPORTS, MIN_SHOWN, fit_threshold, read_buckets
from gateway.api.feedback import FeedbackStore
from gateway.api.schema import FeedbackRequest
from gateway.metrics import Metrics
from shared.errors import StartError


def exposition(*groups: tuple[float, int, int, int]) -> str:
    """Metrics of answers with one prediction each.

    Args:
        groups: usefulness, number shown, number accepted, characters kept of each acceptance.
    """
    metrics = Metrics(dict, lambda: 0)
    store = FeedbackStore(metrics)
    for usefulness, num_shown, num_accepted, num_kept in groups:
        for number in range(num_shown):
            store.add_answer("", "a", [usefulness], 0.1)
            if number < num_accepted:
                store.record("", FeedbackRequest(id="a", index=0, action="accepted", characters=10))
                store.record("", FeedbackRequest(id="a", index=0, action="accepted", kept=num_kept))
    return metrics.exposition().decode()


# By usefulness, each suggestion saves 0.01, 0.1 and 3.5 keys.
FEEDBACK = exposition((0.2, 300, 3, 2), (0.9, 400, 10, 5), (3.0, 200, 100, 8))


def test_the_buckets_are_those_of_the_store() -> None:
    buckets = {bucket.bound: bucket for bucket in read_buckets(FEEDBACK)}
    assert list(buckets) == [0, 0.25, 0.5, 1, 2, 4, 8]
    bucket = buckets[0.5]
    assert (bucket.num("shown"), bucket.num("accepted"), bucket.num("kept")) == (400, 10, 10)
    assert (bucket.kept_characters, bucket.saved_keys) == (5.0, 0.1)
    assert (buckets[8].kept_characters, buckets[8].saved_keys) == (None, None)


@pytest.mark.parametrize(("price", "threshold"), [(0.005, 0), (0.05, 0.5), (0.2, 2), (3.6, None)])
def test_the_threshold_is_the_bound_from_which_on_showing_pays(price: float, threshold: float | None) -> None:
    assert fit_threshold(read_buckets(FEEDBACK), price) == threshold


def test_a_bound_below_a_bucket_that_was_hardly_shown_does_not_count() -> None:
    """As the bucket of the setting in effect, of which only a part is shown."""
    buckets = read_buckets(exposition((0.9, MIN_SHOWN - 1, 50, 8), (3.0, MIN_SHOWN, 100, 8)))
    assert fit_threshold(buckets, 0.1) == 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((), f"0 reports of kept characters.* It takes {MIN_KEPT_REPORTS} reports"),
        (((3.0, MIN_SHOWN, MIN_KEPT_REPORTS - 1, 8),), f"{MIN_KEPT_REPORTS - 1} reports of kept characters"),
        (((3.0, MIN_SHOWN - 1, 90, 8),), f"{MIN_SHOWN - 1} suggestions shown in the fullest bucket"),
    ],
)
def test_too_little_feedback_is_refused_with_what_is_needed(
    groups: tuple[tuple[float, int, int, int], ...], message: str
) -> None:
    with pytest.raises(StartError, match=message):
        fit_threshold(read_buckets(exposition(*groups)), 0.1)


def test_a_text_that_is_no_exposition_is_refused() -> None:
    with pytest.raises(StartError, match="not in Prometheus' text format"):
        read_buckets("<html> is not a metric")
