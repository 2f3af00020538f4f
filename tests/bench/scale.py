"""Machines, cost and first limits for a number of writers: arithmetic with measured figures; it measures nothing.

    python -m tests.bench.scale [--price 0.10]

docs/SCALE.md has the tables, and the command and the commit behind each figure.
"""

from __future__ import annotations

import argparse
import math

WRITERS = 1_000, 10_000, 100_000, 1_000_000
CORES = 2  # of every machine here

# Measured with the embedded checkpoint on an AMD EPYC (Zen 4).
PREDICTIONS_PER_S = 64.0  # by one machine with gateway and worker; no higher load was tried
GATEWAY_S, WORKER_S, ENGINE_S = 1.66e-3, 2.70e-3, 5.6e-3  # CPU time of a prediction
TLS_GATEWAY_S = 3.92e-3  # the gateway's part with workers elsewhere, by an earlier, slower transport
# Measured with GPT-2 small's shape on an AMD EPYC (Zen 5), saturated; a machine is planned at a share of it.
IDEAS_PER_S, PLANNED_SHARE = 33.0, 0.6

# Assumed.
KEYS_PER_S, IDEAS_PER_MINUTE = 5.0, 1.0  # of a writer; the keys are the rhythm of the page's benchmark
BALANCER_CONNECTIONS = 60_000.0
GATEWAY_CONNECTIONS = 10_000.0  # Tercet's own bound


def print_table(heading: str, rows: list[tuple[object, ...]]) -> None:
    """Print a table in Markdown. The heading has its cells separated by bars."""
    print(f"| {heading} |", "|---" * (heading.count("|") + 1) + "|", sep="\n")
    for row in rows:
        print("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the tables of docs/SCALE.md.")
    parser.add_argument("--price", type=float, default=0.10, help="price of a machine per hour (assumed)")
    price = parser.parse_args().price
    by_cpu = CORES / (GATEWAY_S + WORKER_S + ENGINE_S)
    ideas_per_s = PLANNED_SHARE * IDEAS_PER_S
    over_tls = 1 / TLS_GATEWAY_S

    print_table(
        "a machine carries | per second | writers who type",
        [
            ("predictions, as measured", f"{PREDICTIONS_PER_S:.0f}", f"{PREDICTIONS_PER_S / KEYS_PER_S:.0f}"),
            ("predictions, at most by CPU time", f"{by_cpu:.0f}", f"{by_cpu / KEYS_PER_S:.0f}"),
            ("ideas, planned", f"{ideas_per_s:.0f}", f"{60 * ideas_per_s / IDEAS_PER_MINUTE:,.0f}"),
            ("a gateway's core, workers on its machine", f"{1 / GATEWAY_S:.0f}", f"{1 / GATEWAY_S / KEYS_PER_S:.0f}"),
            ("a gateway's core, workers over TLS, at least", f"{over_tls:.0f}", f"{over_tls / KEYS_PER_S:.0f}"),
        ],
    )

    rows: list[tuple[object, ...]] = []
    for writers in WRITERS:
        keys, ideas = writers * KEYS_PER_S, writers * IDEAS_PER_MINUTE / 60
        machines, of_ideas = math.ceil(keys / PREDICTIONS_PER_S), math.ceil(ideas / ideas_per_s)
        at_least = math.ceil(keys / by_cpu)
        cost, cost_of_ideas = (f"{price * count:,.2f}" for count in (machines, of_ideas))
        rows.append((writers, round(keys), machines, at_least, cost, round(ideas), of_ideas, cost_of_ideas))
    heading = "writers who type | predictions/s | machines | at least | per hour | ideas/s | machines | per hour"
    print_table(heading, rows)

    limits = [
        (PREDICTIONS_PER_S / KEYS_PER_S, "one machine, as measured", "another machine"),
        (over_tls / KEYS_PER_S, "a gateway's core, workers over TLS, at least", "another gateway"),
        (1 / GATEWAY_S / KEYS_PER_S, "a gateway's core, workers on its machine", "a gateway on each machine"),
        (GATEWAY_CONNECTIONS, "connections of a gateway", "never reached: its core is full before"),
        (BALANCER_CONNECTIONS, "connections of a load balancer (assumed)", "several, by DNS or anycast"),
    ]
    print_table("writers who type | full | then", [(round(number), *what) for number, *what in sorted(limits)])


if __name__ == "__main__":
    main()
