"""`tercet serve`: starts the pools and stays until it is stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import structlog
import typer

from deploy.cloud.sagemaker import sagemaker_environment
from deploy.supervision.supervisor import ROLES, Supervisor
from deploy.terminal import make_console
from deploy.tuning.planning import Downloads
from shared.errors import StartError
from shared.settings import Settings, service_links
from shared.telemetry import configure_logging, use_log_streams
from shared.tracing import require_opentelemetry

log = structlog.get_logger()


def serve(
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Permit an address beyond loopback without API keys.")
    ] = False,
    sagemaker: Annotated[
        bool, typer.Option("--sagemaker", help="Serve /ping and /invocations as a SageMaker container does.")
    ] = False,
    role: Annotated[
        Literal["workers", "gateway"] | None,
        typer.Option(help="Start only this pool; the other is on another machine (docs/DISTRIBUTED.md)."),
    ] = None,
    idle_status: Annotated[
        int, typer.Option(min=0, max=125, help="Exit code of a stop by TERCET_IDLE_STOP_S, for a service manager.")
    ] = 0,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Without TERCET_MODELS: download SmolLM2 (93 MB) if no model hub answers.")
    ] = False,
    model_path: Annotated[
        Path | None, typer.Argument(help="With --sagemaker: directory of the model; default /opt/ml/model.")
    ] = None,
) -> None:
    """Start the pools, report when every slot is warm, and serve until Ctrl-C."""
    if insecure:
        os.environ["TERCET_INSECURE"] = "1"  # the pools inherit it
    if sagemaker or Settings.load(os.environ).server.sagemaker:
        os.environ.update(sagemaker_environment(os.environ, model_path))
    elif model_path is not None:
        raise StartError("A model's directory belongs to --sagemaker; else set TERCET_MODELS=name=/path.")
    settings = Settings.load(os.environ)
    if settings.server.traces:
        require_opentelemetry()
    use_log_streams()
    configure_logging("serve", settings.server.log)
    if links := service_links(os.environ):
        log.info("service_links_ignored", variables=links)
    if role is not None and settings.server.sagemaker:
        raise StartError("A SageMaker container runs both pools: omit --role.")
    roles = ROLES if role is None else (role,)
    downloads: Downloads = "default" if fetch else "named"
    supervisor = Supervisor(settings, os.environ, make_console(), roles, idle_status=idle_status, downloads=downloads)
    code = supervisor.run()
    os._exit(code)  # all is cleaned up, and the interpreter's own shutdown takes a part of a second
