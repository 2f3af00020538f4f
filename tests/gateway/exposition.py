"""Reads metrics as Prometheus does."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics


def samples(metrics: Metrics, name: str, **labels: str) -> dict[tuple[str, ...], float]:
    """Samples of a name whose labels include these: value by the other labels' values, in the order of their names."""
    return {
        tuple(value for label, value in sorted(sample.labels.items()) if label not in labels): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }


def total(metrics: Metrics, name: str, **labels: str) -> float:
    return sum(samples(metrics, name, **labels).values())
