"""Stage `compiled`: one whole request against `generate` with a static cache and torch.compile, and batched."""

from __future__ import annotations

from deploy.bench.gpu.context import Context
from deploy.bench.gpu.record import Recorder
from deploy.bench.gpu.requests import compare, compare_compiled


def run(context: Context, record: Recorder) -> None:
    record.measure("gateway and static", lambda: compare_compiled(context))
    record.measure("gateway and b-bf16", lambda: compare(context, "b-bf16"))
