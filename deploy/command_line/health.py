"""`tercet health`: whether the instance with these settings is ready, for health checks of containers and scripts."""

from __future__ import annotations

import os
from http import HTTPStatus
from typing import Annotated

import httpx
import typer

from deploy.gateway_client import gateway_client, needs_https, tls_problem
from deploy.supervision.slot_states import slot_reader
from deploy.terminal import make_console
from shared.errors import StartError
from shared.masters.run_directory import lock_holder
from shared.plan import read_plan
from shared.settings import Settings

out = make_console()


def health(
    live: Annotated[
        bool, typer.Option("--live", help="Only whether the gateway answers, not whether its models are loaded.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 2.0,
) -> None:
    """Exit with 0 if this instance is ready, else with 1 and the reason.

    It asks the gateway where the settings say that it listens, with TLS if it has that. Where only workers run
    (`--role workers`), it asks them.
    """
    settings = Settings.load(os.environ)
    is_only_workers = lock_holder(settings, "workers") is not None and lock_holder(settings, "gateway") is None
    if is_only_workers:
        _check_workers(settings)
    else:
        _check_gateway(settings, is_live=live, timeout_s=timeout)
    out.print("live" if live else "ready")


def _check_gateway(settings: Settings, *, is_live: bool, timeout_s: float) -> None:
    """
    Raises:
        StartError: it does not answer, or is not ready.
    """
    # In a SageMaker container there is no other route; elsewhere it is another name of /health/ready.
    path = "/health/live" if is_live and not settings.server.sagemaker else "/ping"
    with gateway_client(settings, os.environ, timeout_s=timeout_s) as client:
        try:
            response = client.get(path)
        except httpx.HTTPError as error:
            if problem := tls_problem(error, None):
                raise StartError(f"The gateway at {settings.url} {problem}") from error
            raise StartError(f"The gateway does not answer at {settings.url}: {error}") from error
    if needs_https(response):
        raise StartError(
            f"The gateway at {settings.url} serves HTTPS: set TERCET_TLS_CERT as in the environment of `tercet serve`."
        )
    if response.status_code == HTTPStatus.OK or (is_live and response.status_code == HTTPStatus.SERVICE_UNAVAILABLE):
        return
    try:
        document = response.json()
        status = document["status"]
        slots = ", ".join(f"slot {slot['slot']} {slot['state']}" for slot in document["slots"])
    except (ValueError, KeyError, TypeError):
        raise StartError(f"The gateway at {settings.url} answers with status {response.status_code}.") from None
    raise StartError(f"The gateway at {settings.url} is not ready ({status}): {slots}.")


def _check_workers(settings: Settings) -> None:
    """
    Raises:
        StartError: a model has no warm slot.
    """
    plan = read_plan(settings.run_path)
    with slot_reader(settings, os.environ, plan, ("workers",)) as read_states:
        found = read_states()
    if found is None:
        raise StartError("A worker does not answer; its log has the reason.")
    warm = {slot.model for slot in plan.slots if found[slot.index].state == "warm"}
    if cold := [model.name for model in plan.models if model.name not in warm]:
        raise StartError(f"No worker has loaded {', '.join(cold)} yet.")
