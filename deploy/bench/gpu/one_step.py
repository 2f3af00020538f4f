"""The kernels' self-check and one decode step: `python -m deploy.bench.gpu.one_step DEVICE DTYPE`.

Prints one JSON line: the kernels in use, what was logged about fallbacks, seconds until the runner was ready.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from deploy.bench.gpu.context import Context, subject
from deploy.bench.gpu.machine import kernels_in_use
from deploy.bench.speed.steps import DecodeSteps


def main(device: str, dtype: str) -> None:
    """Check, then compute one step of three rows."""
    context = Context(out=Path(), is_rehearsal=True, device=device)
    start = time.monotonic()
    found = kernels_in_use(context, "embedded")
    ready_s = time.monotonic() - start
    times = DecodeSteps(subject("embedded"), device, dtype, 4).time(3, 84, 0.0, 2)
    sys.stdout.write(json.dumps({**found, "ready_s": round(ready_s, 2), "step_ms": times}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
