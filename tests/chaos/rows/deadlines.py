"""R6, R16: deadlines, and faults on the way between the gateway and its workers."""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.bench.rounds import percentile
from tests.chaos.http_client import Answer, Connection, completion_request, exchange, find_fault
from tests.chaos.instance import serving_through_proxies
from tests.chaos.load import Load, milliseconds, prioritized
from tests.chaos.measure import Context, Findings, Jitter
from tests.chaos.proxy import Fault, always, random_schedule
from tests.e2e.harness import until

# Each step takes at least this long, so that 256 tokens take longer than the time limits of the requests.
STEP_S = 0.005
SLOW = {"test_step_delay_ms": f"0={1e3 * STEP_S:g},1={1e3 * STEP_S:g}"}
CONTEXT, LENGTH = "The old man looked at the sea and", 256
NUM_CLIENTS = 8  # moderate load: two slots have room for 32 requests


def keep_deadlines(context: Context, findings: Findings) -> None:
    """R6. Random time limits, first against slow engines, then against workers whose responses drip.

    The request id carries the time limit, so that the workers' log shows how long after it a sequence was generated.
    """
    num_requests = context.amount(100, 2000)
    tercet = context.shared(log="debug", **SLOW)
    with Jitter() as jitter:
        late_ms = _overshoots_ms(tercet.port, num_requests, context.seed, findings)
    findings.figures |= {"requests": num_requests, "machine's jitter p99 ms": jitter.ms(0.99)}
    findings.at_most("past the deadline, p99 ms", percentile(late_ms, 0.99), 50.0 + jitter.ms(0.99), is_speed=True)
    findings.at_most("past the deadline, max ms", max(late_ms), 250.0 + jitter.ms(0.99))
    lines = [line for line in tercet.events("branch_finished") if str(line["request_id"]).startswith("limit-")]
    findings.require(bool(lines), "no sequence was generated")
    # Until the end of the step that runs at the deadline; a batch's step takes somewhat longer than its delay.
    over_ms = [1e3 * (line["ended_at"] - line["started_at"]) - _limit_ms(line["request_id"]) for line in lines]
    findings.at_most(
        "generated after the deadline, p99 ms", percentile(over_ms, 0.99), 2e3 * STEP_S + jitter.ms(0.99), is_speed=True
    )
    base = context.directory()
    with (
        serving_through_proxies(base, always(Fault()), models="embedded*2", **SLOW) as (gateway, proxies),
        Jitter() as jitter,
    ):
        for proxy in proxies:
            # The state streams are open and stay as they are; responses drip after head and acknowledgement.
            proxy.set_schedule(always(Fault("drip", after_bytes=200, pause_s=1.0)))
        drip_ms = _overshoots_ms(gateway.port, num_requests // 4, context.seed, findings)
    findings.require(sum(proxy.counts["drip"] for proxy in proxies) > 0, "no connection dripped")
    findings.figures |= {"requests against dripping workers": num_requests // 4}
    findings.at_most(
        "dripping worker: past the deadline, p99 ms", percentile(drip_ms, 0.99), 50.0 + jitter.ms(0.99), is_speed=True
    )
    findings.at_most("dripping worker: past the deadline, max ms", max(drip_ms), 250.0 + jitter.ms(0.99))


def _overshoots_ms(port: int, num_requests: int, seed: int, findings: Findings) -> list[float]:
    """How long after its time limit each request was answered; negative where it was answered before."""

    def run_client(index: int) -> list[tuple[int, Answer]]:
        rng = random.Random(f"{seed}/{index}")
        found: list[tuple[int, Answer]] = []
        with prioritized(), Connection(port) as connection:
            for number in range(num_requests // NUM_CLIENTS + 1):
                limit_ms = rng.randrange(50, 250)
                request_id = f"limit-{limit_ms}-{index}-{number}"
                request = completion_request(
                    CONTEXT, headers={"X-Request-Id": request_id}, length=LENGTH, max_time=limit_ms / 1e3
                )
                found.append((limit_ms, connection.exchange(request)))
        return found

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        found = [pair for pairs in pool.map(run_client, range(NUM_CLIENTS)) for pair in pairs]
    faults = Counter(fault for _, answer in found if (fault := find_fault(answer)))
    findings.none_of("faulty answers", dict(faults))
    return [1e3 * answer.seconds - limit_ms for limit_ms, answer in found]


def _limit_ms(request_id: str) -> float:
    return float(request_id.split("-")[1])


def answer_through_faults(context: Context, findings: Findings) -> None:
    """R16. Half of the connections between the gateway and its workers have a fault, state streams included."""
    seconds, max_time_s = context.amount(10, 60), 2.0
    with (
        serving_through_proxies(context.directory(), always(Fault()), models="embedded*2") as (gateway, proxies),
        Jitter() as jitter,
    ):
        for index, proxy in enumerate(proxies):
            proxy.set_schedule(random_schedule(context.seed + index, 0.5))
        load = Load(
            gateway.port,
            8,
            seed=context.seed,
            make_request=lambda rng: completion_request(CONTEXT, length=rng.randrange(1, 20), max_time=max_time_s),
        )
        with load.running():
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(2.0)
                for proxy in proxies:
                    proxy.drop_connections()  # state streams are long-lived: they get their faults now and then
        for proxy in proxies:
            proxy.set_schedule(always(Fault()))
        until(lambda: _serves(gateway.port), 15, "a whole answer, once the faults are over")
    counts = sum((proxy.counts for proxy in proxies), Counter[str]())
    for kind in ("delay", "drip", "reset", "truncate", "blackhole"):
        findings.require(counts[kind] > 0, f"no connection had the fault {kind}")
    answers = load.answers
    findings.figures |= {
        "answers": len(answers),
        "whole answers": sum(answer.status == 200 for answer in answers),
        "faulty connections": sum(counts.values()) - counts["none"],
        "machine's jitter p99 ms": jitter.ms(0.99),
    }
    findings.none_of("faulty answers", dict(Counter(fault for a in answers if (fault := find_fault(a)))))
    late_ms = milliseconds(answers, 1.0) - 1e3 * max_time_s
    findings.at_most("past the deadline, max ms", late_ms, 100.0 + jitter.ms(0.99))


def _serves(port: int) -> bool:
    answer = exchange(port, completion_request(CONTEXT, length=5))
    return answer.status == 200 and not answer.document()["partial"]
