"""Stage `memcheck`: compute-sanitizer's memcheck on the kernels' self-check and one step."""

from __future__ import annotations

from deploy.bench.gpu.context import Context
from deploy.bench.gpu.record import Recorder
from deploy.bench.gpu.sanitizer import sanitize


def run(context: Context, record: Recorder) -> None:
    record.measure("memcheck", lambda: sanitize(context, "memcheck"))
