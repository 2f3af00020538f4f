"""The Serve application of one model, built from its `args`: `import_path: deploy.cloud.ray.app:build`."""

from __future__ import annotations

from typing import Any

from ray import serve

from deploy.cloud.ray.config import TARGET_LOAD, RayConfig, parse_config
from deploy.cloud.ray.ingress import Ingress
from deploy.cloud.ray.replica import INGRESS, WorkerReplica

# State streams count as ongoing requests of an ingress, as does each branch.
MAX_INGRESS_REQUESTS = 10_000
INGRESS_DRAIN_S = 30.0
DRAIN_POLL_S = 0.2
SAMPLES_PER_WINDOW = 5


def build(args: dict[str, object]) -> Any:
    """The application for `args` (`deploy.cloud.ray.config.RayConfig`); Serve takes builders with one parameter only.

    Raises:
        StartError: an argument is wrong.
    """
    return application(args, WorkerReplica)


def application(args: dict[str, object], worker_class: type[WorkerReplica]) -> Any:
    """As `build`, with workers of this class."""
    config = parse_config(args)
    worker = serve.deployment(worker_class).options(name="Worker", **worker_options(config))
    ingress = serve.deployment(Ingress).options(
        name=INGRESS,
        num_replicas=config.num_ingresses,
        max_ongoing_requests=MAX_INGRESS_REQUESTS,
        max_queued_requests=MAX_INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=INGRESS_DRAIN_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
    )
    return ingress.bind(config, worker.bind(config))


def worker_options(config: RayConfig) -> dict[str, Any]:
    """Serve's options of the workers: placement, batch, queue, scaling and drain."""
    scaling: dict[str, Any] = {"num_replicas": config.min_workers}
    if config.max_workers > config.min_workers:
        scaling = {
            "autoscaling_config": {
                "min_replicas": config.min_workers,
                "max_replicas": config.max_workers,
                "target_ongoing_requests": config.target_ongoing or max(1.0, TARGET_LOAD * config.max_batch),
                "look_back_period_s": config.load_window_s,
                "metrics_interval_s": config.load_window_s / SAMPLES_PER_WINDOW,
                "upscale_delay_s": config.upscale_delay_s,
                "downscale_delay_s": config.downscale_delay_s,
            }
        }
    return {
        **scaling,
        "max_ongoing_requests": config.max_batch,
        "max_queued_requests": config.max_queued or config.max_batch,
        "ray_actor_options": {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
        "request_router_config": {"request_router_class": "deploy.cloud.ray.router:DocumentRouter"},
        "graceful_shutdown_timeout_s": config.drain_s,
        "graceful_shutdown_wait_loop_s": DRAIN_POLL_S,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
    }
