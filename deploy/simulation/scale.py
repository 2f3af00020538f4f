"""From the measured machine to a million writers: machines, cost per thousand suggestions, and what breaks first.

The unit is a cell: one gateway process with a core of its own, and worker machines like the measured one. A load
balancer hashes sessions over the cells, so cells share no work: as many as needed are counted, and a cell is
simulated with the writers that hashing gives a crowded one. Knows no HTTP and no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import simpy

from deploy.load.rounds import percentile
from deploy.simulation.cores import Cores, Steps
from deploy.simulation.costs import Inputs
from deploy.simulation.model import Gateway, Request, Slot
from deploy.simulation.writers import keys_per_s, press_keys

SLOTS_PER_MACHINE = 2
SUGGESTIONS_PER_ANSWER = 3
# Writers of a cell are a binomial share of all: this many standard deviations above its mean are planned for. Of a
# thousand cells one has more.
HASH_DEVIATIONS = 3.1
WARM_UP_S = 2.0


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell has to reach.

    Attributes:
        p99_ms: of the answers, at the gateway.
        answered: share of the keys that are answered; the others are superseded or refused.
    """

    p99_ms: float = 100.0
    answered: float = 0.99


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was not measured: inputs to be replaced by the reader's own.

    Attributes:
        price_per_hour: of a machine like the measured one, in any currency.
        link_s: of a message between gateway and worker.
        redis_operations: for each key, where sessions and quotas are shared.
        redis_per_s: operations of one Redis.
        connections_per_balancer: open connections of one load balancer, a writer holding one.
        descriptors: a gateway's open files; a writer holds one.
        bytes_per_key: of the request and its answer, with headers, at the load balancer.
        link_bytes_per_s: of a machine's network.
    """

    price_per_hour: float = 0.10
    link_s: float = 0.00025
    redis_operations: float = 3.0
    redis_per_s: float = 100_000.0
    connections_per_balancer: float = 60_000.0
    descriptors: float = 65_536.0
    bytes_per_key: float = 3_000.0
    link_bytes_per_s: float = 1.25e9


class CellRow(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated cell.

    Attributes:
        gateway_busy, workers_busy: shares of the gateway's core and of the workers' cores.
        answers_per_s: of keys.
    """

    num_writers: int
    num_machines: int
    answers_per_s: float
    answered: float
    superseded: float
    refused: float
    p50_ms: float
    p99_ms: float
    gateway_busy: float
    workers_busy: float

    def meets(self, goal: Goal) -> bool:
        return self.p99_ms <= goal.p99_ms and self.answered >= goal.answered


class ScaleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A number of writers, and what serves them."""

    num_writers: int
    num_cells: int
    worker_machines: int
    gateway_machines: int
    keys_per_s: float
    cell: CellRow
    cost_per_hour: float
    cost_per_thousand: float  # suggestions


class Limit(msgspec.Struct, frozen=True):
    """At how many writers something is full, and what comes then."""

    what: str
    num_writers: float
    remedy: str


def run_cell(
    inputs: Inputs, assumptions: Assumptions, num_machines: int, num_writers: int, seconds: float, seed: int
) -> CellRow:
    """Writers who type for so long, after a warm-up that does not count."""
    assert inputs.key is not None
    assert inputs.key_costs is not None
    env = simpy.Environment()
    gateway_cores = Cores(env, 1)
    machines = [Cores(env, inputs.num_cores, inputs.costs.contention) for _ in range(num_machines)]
    slots = [Slot(env, cores, inputs.max_batch) for cores in machines for _ in range(SLOTS_PER_MACHINE)]
    gateway = Gateway(env, gateway_cores, slots, inputs.queue, assumptions.link_s)
    kind, costs = inputs.key, msgspec.structs.replace(inputs.key_costs, client_s=0.0)
    wall_ms: list[float] = []
    sent: list[Request] = []

    def send(writer: int) -> Steps:
        started_at = env.now
        request = Request.of(env, kind, costs, writer)
        env.process(gateway.answer(request))
        yield request.delivered
        if started_at >= WARM_UP_S:
            sent.append(request)
            if request.is_answered:
                wall_ms.append(1e3 * (env.now - started_at))

    def press() -> Steps:
        for key in press_keys(random.Random(seed), num_writers, WARM_UP_S + seconds):
            yield env.timeout(key.offset_s - env.now)
            env.process(send(key.writer))

    env.process(press())
    env.run(WARM_UP_S + seconds)
    total = max(1, len(sent))
    return CellRow(
        num_writers=num_writers,
        num_machines=num_machines,
        answers_per_s=len(wall_ms) / seconds,
        answered=len(wall_ms) / total,
        superseded=sum(request.is_superseded for request in sent) / total,
        refused=sum(request.is_refused for request in sent) / total,
        p50_ms=percentile(wall_ms, 0.5) if wall_ms else math.inf,
        p99_ms=percentile(wall_ms, 0.99) if wall_ms else math.inf,
        gateway_busy=gateway_cores.busy_s / env.now,
        workers_busy=sum(cores.busy_s for cores in machines) / env.now / len(machines) / inputs.num_cores,
    )


def largest_cell(
    inputs: Inputs, assumptions: Assumptions, goal: Goal, num_machines: int, seconds: float, seed: int
) -> CellRow | None:
    """The most writers whom a cell of so many worker machines serves as the goal wants; None: not one."""
    low, best = 0, None
    high = max(2, int(2 * num_machines * inputs.num_cores / engine_and_worker_s(inputs) / keys_per_s()))
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        row = run_cell(inputs, assumptions, num_machines, middle, seconds, seed)
        if row.meets(goal):
            low, best = middle, row
        else:
            high = middle
    return best


def engine_and_worker_s(inputs: Inputs) -> float:
    """CPU time of a key in the workers, computed alone."""
    assert inputs.key is not None
    assert inputs.key_costs is not None
    costs, kind = inputs.key_costs, inputs.key
    step_s = costs.step_s + costs.row_s * kind.num_rows
    return costs.worker_s + costs.prompt_s + costs.prefill_s * kind.prompt_tokens + kind.num_steps * step_s


def best_cell(
    inputs: Inputs, assumptions: Assumptions, goal: Goal, seconds: float, seed: int, max_machines: int = 8
) -> list[CellRow]:
    """The largest cells of one, two, … worker machines, until another machine serves no further writers."""
    rows: list[CellRow] = []
    for number in range(1, max_machines + 1):
        row = largest_cell(inputs, assumptions, goal, number, seconds, seed)
        if row is None or (rows and row.num_writers < 1.1 * rows[-1].num_writers):
            break
        rows.append(row)
    return rows


def machines_of(cell: CellRow, inputs: Inputs) -> float:
    """Machines of a cell; a gateway takes one core of one."""
    return cell.num_machines + 1 / inputs.num_cores


def scale(
    inputs: Inputs, assumptions: Assumptions, cell: CellRow, totals: Sequence[int], seconds: float, seed: int
) -> list[ScaleRow]:
    """What serves each number of writers, with the cell that serves most writers per machine."""
    mean = planned_writers(cell.num_writers)
    rows = []
    for total in totals:
        num_cells = math.ceil(total / mean) if total > cell.num_writers else 1
        # The cell with the most writers of all, as far as planned for.
        crowded = min(
            cell.num_writers, total, round(total / num_cells + HASH_DEVIATIONS * math.sqrt(total / num_cells))
        )
        simulated = run_cell(inputs, assumptions, cell.num_machines, crowded, seconds, seed + total)
        gateway_machines = math.ceil(num_cells / inputs.num_cores)
        worker_machines = num_cells * cell.num_machines
        cost_per_hour = assumptions.price_per_hour * (worker_machines + gateway_machines)
        suggestions_per_s = SUGGESTIONS_PER_ANSWER * total * keys_per_s() * simulated.answered
        rows.append(
            ScaleRow(
                num_writers=total,
                num_cells=num_cells,
                worker_machines=worker_machines,
                gateway_machines=gateway_machines,
                keys_per_s=total * keys_per_s(),
                cell=simulated,
                cost_per_hour=cost_per_hour,
                cost_per_thousand=1000 * cost_per_hour / 3600 / suggestions_per_s,
            )
        )
    return rows


def planned_writers(largest: int) -> int:
    """The mean number of writers of a cell that rarely gets more than `largest` by hashing."""
    mean = largest
    while mean > 1 and mean + HASH_DEVIATIONS * math.sqrt(mean) > largest:
        mean -= 1
    return mean


def limits(assumptions: Assumptions, cell: CellRow) -> list[Limit]:
    """What is full at how many writers, the first first."""
    keys = keys_per_s()
    per_writer = cell.num_writers
    found = [
        Limit("cores of one worker machine", per_writer / cell.num_machines, "another worker machine"),
        Limit("CPU of one gateway process", per_writer / cell.gateway_busy, "another gateway: a cell more"),
        Limit("descriptors of one gateway", assumptions.descriptors, "never reached: its CPU is full before"),
        Limit("connections of one load balancer", assumptions.connections_per_balancer, "several, by DNS or anycast"),
        Limit(
            "operations of one Redis",
            assumptions.redis_per_s / assumptions.redis_operations / keys,
            "shards by session, or none: sessions are kept together by hashing",
        ),
        Limit(
            "network of one load balancer",
            assumptions.link_bytes_per_s / assumptions.bytes_per_key / keys,
            "several, by DNS or anycast",
        ),
    ]
    return sorted(found, key=lambda limit: limit.num_writers)


def markdown(cells: Sequence[CellRow], cell: CellRow, rows: Sequence[ScaleRow], found: Sequence[Limit]) -> str:
    """The tables of docs/SCALE.md: cells, numbers of writers, and what is full first."""
    lines = [
        "| worker machines of a cell | writers | answers/s | p50 ms | p99 ms | answered | gateway | workers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.num_machines}{' (chosen)' if row is cell else ''} | {row.num_writers} | {row.answers_per_s:.0f} "
        f"| {row.p50_ms:.1f} | {row.p99_ms:.1f} | {row.answered:.2%} | {row.gateway_busy:.0%} "
        f"| {row.workers_busy:.0%} |"
        for row in cells
    ]
    lines += [
        "",
        "| writers | keys/s | cells | worker machines | gateways' machines | p50 ms | p99 ms | per hour | per 1,000 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.num_writers:,} | {row.keys_per_s:,.0f} | {row.num_cells:,} | {row.worker_machines:,} "
        f"| {row.gateway_machines:,} | {row.cell.p50_ms:.1f} | {row.cell.p99_ms:.1f} "
        f"| {row.cost_per_hour:,.2f} | {row.cost_per_thousand:.5f} |"
        for row in rows
    ]
    lines += ["", "| full first | writers | then |", "|---|---|---|"]
    lines += [f"| {limit.what} | {limit.num_writers:,.0f} | {limit.remedy} |" for limit in found]
    return "\n".join(lines) + "\n"
