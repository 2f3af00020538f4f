"""The threshold that writers' feedback supports: `/metrics` counts predictions by buckets of usefulness.

Pure. Does not know where the metrics come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from deploy.calibrate import fit
from gateway.api.feedback import UP_TO_KEYS, USEFULNESS_BOUNDS_KEYS
from shared.errors import StartError

# At an acceptance of 5 %, ten acceptances: enough to tell a bucket that pays from one that does not.
MIN_SHOWN = 200
# Reports of kept characters, over all buckets.
MIN_KEPT_REPORTS = 50


@dataclass(slots=True)
class Bucket:
    """Predictions of about the same usefulness, from `bound` keys on, to the next bucket's bound."""

    bound: float
    num_by_action: dict[str, int] = field(default_factory=dict)
    num_kept_characters: int = 0

    def num(self, action: str) -> int:
        return self.num_by_action.get(action, 0)

    @property
    def kept_characters(self) -> float | None:
        """Average for each acceptance, over those with a report. None without one."""
        return self.num_kept_characters / self.num("kept") if self.num("kept") else None

    @property
    def saved_keys(self) -> float | None:
        """Characters kept for each suggestion shown, less one key for each acceptance."""
        if not self.num("shown"):
            return None
        return self.num("accepted") * ((self.kept_characters or 0.0) - 1) / self.num("shown")


def read_buckets(exposition: str) -> list[Bucket]:
    """The buckets, the least useful first.

    Args:
        exposition: metrics in Prometheus' text format.

    Raises:
        StartError: the text is not in that format.
    """
    buckets = dict(zip(UP_TO_KEYS, map(Bucket, (0.0, *USEFULNESS_BOUNDS_KEYS)), strict=True))
    try:
        samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]
    except ValueError as error:
        raise StartError(f"The metrics are not in Prometheus' text format ({error}).") from error
    for sample in samples:
        bucket = buckets.get(sample.labels.get("up_to_keys", ""))
        if bucket is None:
            continue
        if sample.name == "tercet_predictions_total":
            bucket.num_by_action[sample.labels["action"]] = int(sample.value)
        elif sample.name == "tercet_prediction_kept_characters_total":
            bucket.num_kept_characters = int(sample.value)
    return list(buckets.values())


def fit_threshold(buckets: Sequence[Bucket], price: float) -> float | None:
    """The bucket bound from which on showing saves the most keys after the price.

    A bound counts if the bucket above it was shown `MIN_SHOWN` times; predictions below the setting in effect are not
    shown, so their buckets do not count.

    Args:
        price: keys that reading a suggestion costs.

    Returns:
        None if no bound saves more than showing nothing.

    Raises:
        StartError: there is too little feedback; the message says how much is needed.
    """
    num_reports = sum(bucket.num("kept") for bucket in buckets)
    most_shown = max(bucket.num("shown") for bucket in buckets)
    if num_reports < MIN_KEPT_REPORTS or most_shown < MIN_SHOWN:
        raise StartError(
            f"Too little feedback on predictions: {num_reports} reports of kept characters, and {most_shown} "
            f"suggestions shown in the fullest bucket. It takes {MIN_KEPT_REPORTS} reports (POST /feedback with kept) "
            f"and {MIN_SHOWN} suggestions in a bucket; the counts begin anew when the gateway starts."
        )
    groups = [
        fit.Group(bucket.bound, bucket.num("shown"), bucket.saved_keys * bucket.num("shown"))
        for bucket in buckets
        if bucket.saved_keys is not None
    ]
    return fit.fit_threshold(groups, price, MIN_SHOWN)
