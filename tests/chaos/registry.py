"""The rows of docs/RELIABILITY.md, in the order of their measurement, and what is not measured."""

from __future__ import annotations

from tests.chaos.measure import Row
from tests.chaos.rows.clients import (
    serve_with_few_descriptors,
    survive_slow_clients,
    survive_slow_clients_behind_nginx,
)
from tests.chaos.rows.deadlines import answer_through_faults, keep_deadlines
from tests.chaos.rows.gateways import kill_gateways, kill_the_shared_store
from tests.chaos.rows.overload import refuse_overload
from tests.chaos.rows.soak import hold_no_more_after_many_requests
from tests.chaos.rows.tested import run_tests
from tests.chaos.rows.workers import (
    kill_workers,
)

ROWS = (
    Row(
        "R1",
        "A random warm worker killed (-9) whenever all are warm: 0 failed requests; p99 at most calm p99 + one retry",
        kill_workers,
    ),
    Row(
        "R2",
        "0 failed across HUP of either pool, and across stop and start behind a kept socket",
        run_tests("tests/e2e/test_lifecycle.py", only="reloading or kept_socket"),
    ),
    Row(
        "R3",
        "On TERM accepted work finishes, readiness turns 503 first, exit at most grace + 1 s, no process left",
        run_tests("tests/e2e/test_lifecycle.py", only="kept_socket"),
    ),
    Row(
        "R4",
        "Worker stopped (SIGSTOP), or its engine looping: caller answered by its deadline + 100 ms, worker replaced",
        run_tests(
            "tests/e2e/test_pools.py::test_a_stopped_worker_is_replaced_and_its_requests_answered",
            "tests/e2e/test_engine_failures.py",
            only="stopped or looping",
        ),
    ),
    Row(
        "R5",
        "A fatal device error, or a second out-of-memory error in a row: the process is gone in 500 ms",
        run_tests(
            "tests/e2e/test_engine_failures.py",
            "tests/workers/engine/test_failures.py",
            only="device_error or second_out_of_memory",
        ),
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
        "R8",
        "One slot busy, or five times slower than the other: requests that the other can serve are not held behind it",
        run_tests(
            "tests/gateway/pool/test_placement.py",
            "tests/e2e/test_pools.py::test_unequal_slots_share_load_by_their_speed",
        ),
    ),
    Row(
        "R9",
        "Branch outcomes {ok, crash, timeout, 5xx, garbage, oversize}³: all 216 merged rightly",
        run_tests("tests/gateway/api/test_branch_outcomes.py"),
    ),
    Row(
        "R10",
        "Rolling change of model, slot by slot, under load: 0 failed, no answer mixes models",
        run_tests("tests/e2e/test_lifecycle.py", only="rolling"),
    ),
    Row(
        "R11",
        "500 clients that drip header, body or reading, through nginx: others' p99 at most doubles, 0 failed",
        survive_slow_clients_behind_nginx,
    ),
    Row(
        "R12",
        "Client gone, over HTTP and TLS: its sequences free within 200 ms; disconnects leak no sequence, descriptor or "
        "thread",
        run_tests("tests/e2e/test_cancelling.py", "tests/e2e/test_engine_failures.py", only="hang"),
    ),
    Row(
        "R13",
        "Bad inputs: no 5xx, all 4xx problem+json, none takes a worker",
        run_tests("tests/gateway/api/test_bad_requests.py", "tests/e2e/test_openapi.py"),
    ),
    Row(
        "R14",
        "Soak: after warm-up memory grows at most 5 MB a process, descriptors and threads by 0",
        hold_no_more_after_many_requests,
    ),
    Row(
        "R15",
        "Cold starts: no request ever reaches a slot that is not warm",
        run_tests(
            "tests/gateway/pool/test_slot_table.py",
            "tests/gateway/pool/test_admission.py::test_only_warm_slots_get_branches",
            "tests/e2e/test_pools.py::test_killed_workers_are_replaced_in_their_slots_and_no_request_fails",
        ),
    ),
    Row(
        "R16",
        "Chaos proxy between gateway and workers: every client gets one well-formed answer by its deadline + 100 ms",
        answer_through_faults,
    ),
    Row(
        "R19",
        "Jobs with the gateway killed (-9): none lost, none stuck, one final state each, every store",
        run_tests("tests/gateway/jobs/test_runner.py"),
    ),
    Row(
        "R20",
        "`tercet serve` killed (-9) under load: started again at once, it serves; what the gateway had accepted gets "
        "an answer or a refusal, none a reset",
        run_tests("tests/e2e/test_lifecycle.py", only="supervisor"),
    ),
    Row(
        "R21",
        "A reload whose new workers cannot load: the old workers serve on, the next reload and TERM work, the failure "
        "is reported",
        run_tests("tests/e2e/test_lifecycle.py", only="failed_reload"),
    ),
    Row(
        "R22",
        "1,150 idle connections at `ulimit -n 1024`; 128 descriptors: no request in flight is lost, refusals are clear",
        serve_with_few_descriptors,
    ),
    Row(
        "R23",
        "A draining gateway accepts nothing: refused at once, no connection hangs or is reset; a stream that is cut "
        "says `error`",
        run_tests(
            "tests/e2e/test_clients.py::test_a_draining_gateway_refuses_connections_and_ends_streams_with_an_error"
        ),
    ),
    Row(
        "R24",
        "Two gateways behind nginx on one pool, one killed (-9) under load: 0 failed, but for streams that had begun",
        kill_gateways,
    ),
    Row(
        "R25",
        "The store that two gateways share killed (-9) under load, and back: 0 failed, used again when it is back",
        kill_the_shared_store,
    ),
    Row(
        "S1",
        "Every route × method × path trick: 401 unless open; a new route is closed until listed",
        run_tests("tests/gateway/middleware/test_api_keys.py", "tests/e2e/test_keys.py"),
    ),
    Row(
        "S2",
        "Keys kept as SHA-256, compared in constant time, all scanned; no key file and not on loopback: refuses to "
        "start",
        run_tests("tests/shared/test_api_keys.py", "tests/shared/masters/test_startup.py", "tests/deploy/test_cli.py"),
    ),
    Row(
        "S3",
        "Limits at +1: 411, 413, 414, 422, 431; at most 64 KiB read of a 1 GB upload",
        run_tests(
            "tests/gateway/middleware/test_body_limits.py",
            "tests/gateway/server/test_connections.py",
            "tests/e2e/test_clients.py",
        ),
    ),
    Row(
        "S4",
        "A key's rate within ±1 of theory from 8 threads; one key's flood leaves another's latency alone",
        run_tests("tests/gateway/middleware/test_rate_limits.py", "tests/gateway/pool/test_fair_queue.py"),
    ),
    Row(
        "S5",
        "Workers listen on no TCP port; sockets 0600",
        run_tests("tests/e2e/test_pools.py::test_workers_listen_only_on_private_sockets"),
    ),
    Row(
        "S6",
        "Canary prompts and keys: none in logs (debug), metrics, errors, and of final jobs in the job store",
        run_tests(
            "tests/gateway/api/test_canaries.py",
            "tests/e2e/test_keys.py::test_no_key_is_in_a_log_or_a_metric",
            "tests/gateway/jobs/test_stores.py::test_a_prompt_is_erased_at_the_end_and_a_result_at_expiry",
        ),
    ),
    Row(
        "S7",
        "A pickle checkpoint or remote code is refused; nothing of it runs",
        run_tests(
            "tests/workers/checkpoints/test_untrusted.py",
            "tests/workers/checkpoints/test_checkpoints.py::test_a_pickle_is_refused_with_a_command_that_converts_it",
        ),
    ),
    Row(
        "S9",
        "The SBOM matches the lock; the audit passes only if every package was audited",
        run_tests("tests/deploy/test_requirements.py"),
    ),
    Row(
        "S10",
        "Foreign job ids: 404, the body and the time of an unknown id",
        run_tests("tests/gateway/api/test_jobs.py::test_a_job_of_another_key_is_answered_as_an_unknown_one"),
    ),
    Row(
        "S11",
        "Origins and Host: only those listed",
        run_tests("tests/gateway/middleware/test_origins.py"),
    ),
    Row(
        "S12",
        "The run directory: only files that this instance made are removed, only after it started; symlinks and "
        "foreign directories refused",
        run_tests(
            "tests/shared/masters/test_run_directory.py",
            "tests/e2e/test_pools.py",
            only="run_directory or refused_start or second_serve",
        ),
    ),
    Row(
        "S13",
        "300 clients that drip header or body, 230 that pipeline and never read, over HTTP and TLS, no nginx: others' "
        "p99 at most doubles, stop takes no longer",
        survive_slow_clients,
    ),
    Row(
        "S14",
        "No answer (`cached_tokens`, times) reveals what another key or session has written",
        run_tests("tests/workers/engine/test_cache_scope.py"),
    ),
    Row(
        "S15",
        "Ambiguous framing: connection closed, nothing of a body in a log at any level; no core dump holds a prompt",
        run_tests(
            "tests/gateway/server/test_framing.py",
            "tests/e2e/test_clients.py",
            "tests/e2e/test_pools.py::test_workers_listen_only_on_private_sockets",
        ),
    ),
    Row(
        "D2",
        "A SageMaker container under full load: `/ping` at most 100 ms at p99; exit at most 25 s after TERM",
        run_tests("tests/e2e/test_sagemaker.py", "tests/e2e/test_overload.py", only="ping or sigterm or health_checks"),
    ),
)

NOT_MEASURED = {
    "R17, R18, D1, S8": "`make test-deploy` shows them, without a running systemd and without a cluster of machines",
    "S9, advisories": "`make audit` needs the advisory service; run it where that can be reached",
    "S11, in a browser": "the browser tests of `make test-integration` show it",
}
