"""Stage `compiled`: one whole request against `generate` with a static cache and torch.compile, and batched."""

from __future__ import annotations

from deploy.bench.gpu.context import Context
from deploy.bench.gpu.record import Recorder
from deploy.bench.gpu.requests import compare


def run(context: Context, record: Recorder) -> None:
    if context.is_rehearsal:
        record.skip("gateway and static", "a rehearsal does not compile: on two cores that takes minutes")
        record.skip("gateway and b-bf16", "a rehearsal has one baseline, in stage request")
        return
    record.measure("gateway and static", lambda: compare(context, "static"))
    record.measure("gateway and b-bf16", lambda: compare(context, "b-bf16"))
