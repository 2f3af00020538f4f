"""The configuration of one model's application: `args` in a Serve config file.

Ray's placement and scaling are configured here, everything else of a worker by `TERCET_*` variables, as on one machine.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.errors import StartError

# Autoscaling aims at this share of the requests that a worker computes without waiting.
TARGET_LOAD = 0.75


class RayConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One model on Ray.

    Attributes:
        model: an entry of `TERCET_MODELS` without its count, like "small" or "legal=/models/legal-gpt2".
        num_gpus: GPUs of one worker; 0.25 puts four workers on a GPU, 0 computes on the CPU.
        num_cpus: that Ray reserves for one worker; on a CPU also its compute threads.
        max_batch: branches that one worker computes at once: Serve's `max_ongoing_requests`.
        min_workers, max_workers: bounds of autoscaling; equal numbers disable it.
        target_ongoing: branches per worker that autoscaling aims at; by default three quarters of `max_batch`.
        load_window_s: over which autoscaling averages the load.
        upscale_delay_s, downscale_delay_s: how long that average must be above or below its target.
        max_queued: branches that wait in one ingress for a worker; more are refused with `slot_full`. By default
            `max_batch`.
        num_ingresses: replicas of the ingress, spread over the nodes.
        drain_s: how long a worker that is removed may finish what it has accepted.
    """

    model: str
    num_gpus: Annotated[float, Meta(ge=0, le=1)] = 0.0
    num_cpus: Annotated[float, Meta(gt=0)] = 1.0
    max_batch: Annotated[int, Meta(ge=1, le=1024)] = 48
    min_workers: Annotated[int, Meta(ge=1)] = 1
    max_workers: Annotated[int, Meta(ge=1)] = 1
    target_ongoing: Annotated[float, Meta(gt=0)] | None = None
    load_window_s: Annotated[float, Meta(ge=1)] = 30.0
    upscale_delay_s: Annotated[float, Meta(ge=0)] = 10.0
    downscale_delay_s: Annotated[float, Meta(ge=0)] = 300.0
    max_queued: Annotated[int, Meta(ge=1)] | None = None
    num_ingresses: Annotated[int, Meta(ge=1)] = 2
    drain_s: Annotated[float, Meta(ge=0)] = 60.0


def parse_config(args: dict[str, object]) -> RayConfig:
    """The application's arguments.

    Raises:
        StartError: a field is unknown, missing or out of its range; the message names it.
    """
    try:
        config = msgspec.convert(args, RayConfig)
    except msgspec.ValidationError as error:
        raise StartError(f"The args of this Serve application are invalid: {error}.") from error
    if config.max_workers < config.min_workers:
        raise StartError(
            f"max_workers={config.max_workers} is less than min_workers={config.min_workers}: raise one, or lower the "
            "other."
        )
    return config
