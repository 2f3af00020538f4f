"""The rows of docs/RELIABILITY.md that are measured. The page names the tests that show the others."""

from __future__ import annotations

from functools import partial

from tests.chaos.measure import Row
from tests.chaos.rows.attacks import withstand_attacks
from tests.chaos.rows.bulkheads import keep_others_served
from tests.chaos.rows.clients import survive_slow_clients, survive_slow_clients_behind_nginx
from tests.chaos.rows.deadlines import answer_through_faults, keep_deadlines
from tests.chaos.rows.files import lose_files
from tests.chaos.rows.mixed import flat_usage_over_cycles
from tests.chaos.rows.overload import refuse_overload
from tests.chaos.rows.resources import run_out_of_resources, serve_with_a_log_that_is_not_read
from tests.chaos.rows.signals import heal_after_refused_reloads, signal_at_any_moment
from tests.chaos.rows.soak import hold_no_more_after_many_requests
from tests.chaos.rows.workers import kill_workers

ROWS = (
    Row(
        "R1",
        "A random warm worker killed (-9) whenever all are warm: 0 failed requests; p99 at most calm p99 + one retry",
        kill_workers,
    ),
    Row(
        "R6",
        "Deadline kept within 50 ms for 99 % (250 ms for all), also against a worker that drips a byte a second; "
        "generation stops within one step",
        keep_deadlines,
    ),
    Row(
        "R7",
        "10× overload: goodput at least 90 % of peak; refusals p99 at most 50 ms, max 250 ms, 503 or 429 with "
        "`Retry-After`; queue never past its bound",
        refuse_overload,
    ),
    Row(
        "R11",
        "500 clients that drip header, body or reading, through nginx: others' p99 at most doubles, 0 failed",
        survive_slow_clients_behind_nginx,
    ),
    Row(
        "R14",
        "Soak: after warm-up memory grows at most 5 MB a process, descriptors and threads by 0",
        hold_no_more_after_many_requests,
    ),
    Row(
        "R16",
        "Chaos proxy between gateway and workers: every client gets one well-formed answer by its deadline + 100 ms",
        answer_through_faults,
    ),
    Row(
        "R26",
        "TERM at any moment of a worker's start ends that process within its grace and nothing else; a storm of HUPs "
        "is one reload and one that waits, at most two processes per slot, 0 failed",
        signal_at_any_moment,
    ),
    Row(
        "R27",
        "After a refused reload any single death is healed as before: no master and no sibling ends, 0 failed",
        heal_after_refused_reloads,
    ),
    Row(
        "R28",
        "One key bursts at any route, or the job store hangs: another key's completions 0 failed, its requests at the "
        "same route no 503, p99 at most doubles; no worker is replaced",
        keep_others_served,
    ),
    Row("R28-INT8", "The same with the quantized model", partial(keep_others_served, dtype="int8")),
    Row(
        "R28-ATTACKS",
        "Bodies that drip or have no valid key: another key's 300 kB at most 90 ms, its 1 MB answered; sessions that "
        "are superseded: p50 at most 70 ms; bodies of gzip members: p99 at most doubles; 0 failed",
        withstand_attacks,
    ),
    Row(
        "R30",
        "Files removed while they are used (run directory cleaned or deleted, sockets, job file): 0 failed requests, "
        "all made again, each lost job counted in the log",
        lose_files,
    ),
    Row(
        "R33",
        "Requests of all kinds, clients that hang up, reloads and killed workers: 0 failed, no job lost; every process "
        "at the same age holds what the first did: memory + 5 MB, descriptors and threads + 0",
        flat_usage_over_cycles,
    ),
    Row(
        "R34",
        "A log that is not read, through load and a reload: 0 failed, readiness true, dropped records are counted",
        serve_with_a_log_that_is_not_read,
    ),
    Row(
        "R35",
        "Threads and descriptors run out in the gateway and in a worker: 200 or 503, no process ends, all served again",
        run_out_of_resources,
    ),
    Row(
        "S13",
        "300 clients that drip header or body, 230 that pipeline and never read, over HTTP and TLS, no nginx: others' "
        "p99 at most doubles, stop takes no longer",
        survive_slow_clients,
    ),
)
