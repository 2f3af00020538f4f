"""Stage `workers`: answers per second of one worker on the GPU and of two, through the gateway."""

from __future__ import annotations

import sys
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console

from deploy.load.clients import LOOPBACK, raise_for_status
from deploy.load.prompts import PromptGenerator
from tests.bench.gpu.context import Context, subject
from tests.bench.gpu.record import Recorder
from tests.bench.gpu.requests import options
from tests.bench.speed.contenders import Contenders

NUM_CLIENTS = 48
SECONDS = 8.0


def run(context: Context, record: Recorder) -> None:
    for count in (1, 2):
        record.measure(f"{count} per GPU", partial(_measure, context, count))


def _measure(context: Context, count: int) -> dict[str, Any]:
    models = f"{context.model}*{count}"
    prompts = PromptGenerator(subject(context.model), 0)
    with Contenders(options(context, models), Console(file=sys.stderr, width=120)) as contenders:
        server = contenders.start_server(models)
        clients = contenders.start_clients((LOOPBACK, server.port), subject(context.model), prompts.seed())
        load = clients.call(
            "send_for", 4 if context.is_rehearsal else NUM_CLIENTS, 1 if context.is_rehearsal else SECONDS
        )
    replies = raise_for_status(load.replies)
    return {
        "answers_per_s": round(len(replies) / load.elapsed_s, 1),
        "p50_ms": round(median(reply.wall_ms for reply in replies), 1),
        "client_cpu_s": round(load.client_cpu_s, 2),
    }
