"""R2, R10, R21: the changes under load of `tests.e2e.lifecycle`, more often. Its assertions are the promises."""

from __future__ import annotations

import socket

from tests.chaos.instance import end, make_tercet, serving
from tests.chaos.measure import Context, Findings
from tests.e2e import lifecycle
from tests.e2e.harness import until


def reload_and_restart(context: Context, findings: Findings) -> None:
    """R2. HUP of each pool, then stop and start behind a socket that this process keeps listening."""
    num_rounds = context.amount(1, 10)
    with serving(context.directory(), models="embedded*2") as tercet:
        lifecycle.reload_pools(tercet, num_rounds)
        findings.figures["HUPs of each pool"] = num_rounds
        findings.figures["requests across HUPs"] = len(tercet.events("request_finished"))
    tercet = make_tercet(context.directory(), None, models="embedded*2")
    with socket.create_server(("127.0.0.1", tercet.port), backlog=2048) as listener:
        try:
            lifecycle.start_behind(tercet, listener)
            tercet.wait_until_warm()
            until(lambda: tercet.num_starts, 10, "announced")
            lifecycle.restart_behind_a_kept_socket(tercet, listener, num_rounds)
        finally:
            end(tercet)
    findings.figures["restarts behind a kept socket"] = num_rounds
    findings.figures["requests across restarts"] = len(tercet.events("request_finished"))
    findings.figures["failed"] = 0


def change_the_model(context: Context, findings: Findings) -> None:
    """R10. Two checkpoints that answer differently; requests have a branch on each slot."""
    base = context.directory()
    first, second = lifecycle.make_checkpoint(base / "a"), lifecycle.make_checkpoint(base / "b", scale=1.5)
    link = base / "mine"
    link.symlink_to(first)
    num_changes = context.amount(1, 10)
    with serving(context.directory(), models=f"mine={link}*2", placement="spread") as tercet:
        lifecycle.change_model(tercet, link, (first, second), num_changes)
        findings.figures["changes of model"] = num_changes
        findings.figures["requests"] = len(tercet.events("request_finished"))
        findings.figures |= {"failed": 0, "answers that mix models": 0}


def fail_reloads(context: Context, findings: Findings) -> None:
    """R21. Weights that are garbage, a configuration that a master refuses, and weights that are no numbers."""
    base = context.directory()
    good = lifecycle.make_checkpoint(base / "a")
    broken = lifecycle.make_checkpoint(base / "broken", scale=float("nan"))
    link = base / "mine"
    link.symlink_to(good)
    num_rounds = context.amount(1, 2)
    with serving(context.directory(), models=f"mine={link}*2", placement="spread") as tercet:
        lifecycle.fail_reloads(tercet, good / "model.safetensors", num_rounds)
        lifecycle.refuse_a_broken_model(tercet, link, broken)
        findings.figures["reloads that fail"] = 3 * num_rounds + 1
        findings.figures["requests"] = len(tercet.events("request_finished"))
        findings.figures["failed requests"] = 0
