"""Machines, cost and first limits for a number of writers: arithmetic with recorded figures; it measures nothing.

    python -m tests.bench.scale [--price 0.10]

docs/SCALE.md has the tables, and which result files they are computed from.
"""

from __future__ import annotations

import argparse
import math

from tests.bench.results import Row, markdown, read

WRITERS = 1_000, 10_000, 100_000, 1_000_000
CORES = 2  # of every machine here
PRICE = 0.10

# Assumed.
KEYS_PER_S, IDEAS_PER_MINUTE = 5.0, 1.0  # of a writer; the keys are the rhythm of the page's benchmark
PLANNED_SHARE = 0.6  # of the ideas at which a machine is saturated
BALANCER_CONNECTIONS = 60_000.0
GATEWAY_CONNECTIONS = 10_000.0  # Tercet's own bound


class Figures:
    """What was measured, with one machine's cores."""

    def __init__(self) -> None:
        cost = read("cost-prediction").rows[-1]  # the most slots and clients
        self.gateway_s, self.workers_s = _number(cost, "gateway, ms") / 1e3, _number(cost, "workers, ms") / 1e3
        self.tls_gateway_s = _number(read("remote").rows[-1], "gateway, ms") / 1e3
        # No higher load was tried.
        self.predictions_per_s = _number(read("live-writing").rows[-1], "answered/s")  # of the most writers
        self.ideas_per_s = PLANNED_SHARE * max(_number(row, "QPS") for row in read("http").rows)
        self.most_predictions_per_s = CORES / (self.gateway_s + self.workers_s)


def table(name: str, price: float = PRICE) -> str:
    """A table in Markdown: machine, writers or limits."""
    tables = {"machine": _machine, "writers": lambda figures: _writers(figures, price), "limits": _limits}
    return markdown(tables[name](Figures()))


def _machine(figures: Figures) -> list[Row]:
    rates = {
        "predictions, as measured": figures.predictions_per_s,
        f"predictions, at most: {1e3 * (figures.gateway_s + figures.workers_s):.1f} ms of CPU time each": (
            figures.most_predictions_per_s
        ),
        "a gateway's core, workers on its machine": 1 / figures.gateway_s,
        "a gateway's core, workers over TLS, at least": 1 / figures.tls_gateway_s,
    }
    rows: list[Row] = [
        {"a machine carries": what, "per second": round(rate), "writers who type": math.floor(rate / KEYS_PER_S)}
        for what, rate in rates.items()
    ]
    ideas = f"ideas, planned at {PLANNED_SHARE:.0%} of what it can answer"
    writers = round(60 * figures.ideas_per_s / IDEAS_PER_MINUTE)
    return [*rows, {"a machine carries": ideas, "per second": round(figures.ideas_per_s), "writers who type": writers}]


def _writers(figures: Figures, price: float) -> list[Row]:
    rows: list[Row] = []
    for writers in WRITERS:
        keys, ideas = writers * KEYS_PER_S, writers * IDEAS_PER_MINUTE / 60
        machines, of_ideas = math.ceil(keys / figures.predictions_per_s), math.ceil(ideas / figures.ideas_per_s)
        rows.append(
            {
                "writers who type": writers,
                "predictions/s": round(keys),
                "machines": machines,
                "at least": math.ceil(keys / figures.most_predictions_per_s),
                "per hour": f"{price * machines:,.2f}",
                "ideas/s": round(ideas),
                "machines for ideas": of_ideas,
                "of these per hour": f"{price * of_ideas:,.2f}",
            }
        )
    return rows


def _limits(figures: Figures) -> list[Row]:
    limits = [
        (figures.predictions_per_s / KEYS_PER_S, "one machine, as measured", "another machine"),
        (1 / figures.tls_gateway_s / KEYS_PER_S, "a gateway's core, workers over TLS, at least", "another gateway"),
        (1 / figures.gateway_s / KEYS_PER_S, "a gateway's core, workers on its machine", "a gateway on each machine"),
        (GATEWAY_CONNECTIONS, "connections of a gateway", "never reached: its core is full before"),
        (BALANCER_CONNECTIONS, "connections of a load balancer (assumed)", "several, by DNS or anycast"),
    ]
    return [
        {"writers who type": math.floor(number), "full": full, "then": then} for number, full, then in sorted(limits)
    ]


def _number(row: Row, heading: str) -> float:
    value = row[heading]
    assert isinstance(value, int | float), heading
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the tables of docs/SCALE.md.")
    parser.add_argument("--price", type=float, default=PRICE, help="price of a machine per hour (assumed)")
    price = parser.parse_args().price
    print("\n\n".join(table(name, price) for name in ("machine", "writers", "limits")))


if __name__ == "__main__":
    main()
