"""What `tercet serve` prints: of its models, how to use the server, and how gateways reach its workers."""

from __future__ import annotations

import shlex
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from deploy.terminal import labelled
from shared.plan import Plan
from shared.setting_values import PoolUrl
from shared.settings import Settings


def progress_line(stage: str, share: float) -> str:
    """What the search for a model does at present, and how much of it is done."""
    return f"{stage} … {share:.0%}" if share else f"{stage} …"


@contextmanager
def model_progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar that shows what the search for a model does; on a terminal only."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Looking for models …", total=None)

        def show(stage: str, share: float) -> None:
            bar.update(task, description=f"{stage} …", completed=share, total=1.0 if share else None)

        yield show


def print_models(console: Console, plan: Plan) -> None:
    """Why each model of a plan is this one, and what is to be known of it."""
    for model in plan.models:
        if model.note:
            console.print(model.note, highlight=False, soft_wrap=True)
        if model.warning:
            console.print(labelled("Note:", "yellow", model.warning))


def print_ready(
    console: Console, settings: Settings, plan: Plan, roles: tuple[str, ...], failed_slots: Mapping[int, str]
) -> None:
    """
    Args:
        roles: the pools that were started.
        failed_slots: reasons by index of the slots that are not warm.
    """
    for index, reason in failed_slots.items():
        slot = plan.slots[index]
        console.print(
            labelled(f"Slot {index} ({slot.model} on {slot.device}) is not warm and tries again:", "yellow", reason),
            soft_wrap=True,
        )
    if "gateway" in roles:
        _print_gateway(console, settings, _warm_slots(plan, failed_slots))
    else:
        _print_workers(console, settings, plan, _warm_slots(plan, failed_slots))


def _warm_slots(plan: Plan, failed_slots: Mapping[int, str]) -> Text:
    if not plan.slots:
        return Text()
    counts = Counter(slot.model for slot in plan.slots)
    models = ", ".join(f"{model} × {count}" for model, count in counts.items())
    warm = f"{len(failed_slots)} of {len(plan.slots)} slots failed" if failed_slots else "Every slot is warm"
    return labelled(warm, "yellow" if failed_slots else "green", f"({models})")


def _print_gateway(console: Console, settings: Settings, warm_slots: Text) -> None:
    url = settings.url
    names = [name for name in settings.access.hosts if "*" not in name]
    if settings.uses_tls and names:  # the certificate has a name, perhaps not the address
        url = f"https://{names[0]}:{settings.server.bind.port}"
    cert = f"--cacert {shlex.quote(str(settings.access.tls_cert))} " if settings.uses_tls else ""
    key = '-H "Authorization: Bearer $TERCET_API_KEY" ' if settings.requires_keys else ""
    path = "/invocations" if settings.server.sagemaker else "/autocomplete"
    remote = " with the workers of TERCET_POOL" if settings.remote.pool else ""
    console.print(
        Text.assemble(warm_slots, ". " * bool(warm_slots), "Serving at ", (url, "bold"), f"{remote}; Ctrl-C stops.")
    )
    write_at = Text.assemble("Write at ", (f"{url}/", "bold"), " or try:\n")
    console.print("Try:\n" if settings.server.sagemaker else write_at)
    console.print(
        f"""  curl {cert}{key}-d '{{"context": "The old man looked at the sea and"}}' {url}{path}\n""",
        highlight=False,
        soft_wrap=True,
    )
    if warning := _exposure(settings):
        console.print(labelled("Note:", "yellow", warning), soft_wrap=True)


def _exposure(settings: Settings) -> str:
    """What other machines can do or read; "" on loopback, and in a SageMaker container, which AWS guards."""
    if settings.server.bind.is_loopback or settings.server.sagemaker:
        return ""
    if not settings.requires_keys:
        who = f"every machine that reaches {settings.server.bind} can use this server, because it has no API keys"
        return f"{who}." if settings.uses_tls else f"{who}, and texts cross the network unencrypted."
    if settings.uses_tls:
        return ""
    return f"API keys and texts cross the network to {settings.server.bind} unencrypted, unless a proxy adds TLS."


def _print_workers(console: Console, settings: Settings, plan: Plan, warm_slots: Text) -> None:
    """A slot has a port of its own; ports of one model that follow each other are one entry of `TERCET_POOL`."""
    bind = settings.remote.pool_bind
    assert bind is not None
    host = socket.gethostname() if bind.host in {"0.0.0.0", "::"} else bind.host
    scheme: Literal["http", "https"] = "http" if settings.remote.pool_tls_cert is None else "https"
    urls: list[PoolUrl] = []
    for slot in plan.slots:
        port = bind.port + slot.index
        if urls and (urls[-1].model, urls[-1].last_port) == (slot.model, port - 1):
            urls[-1] = replace(urls[-1], last_port=port)
        else:
            urls.append(PoolUrl(slot.model, scheme, host, port, port))
    console.print(
        Text.assemble(warm_slots, "; Ctrl-C stops. Gateways reach the workers with the same TERCET_POOL_KEY and\n")
    )
    console.print(f"  TERCET_POOL={','.join(map(str, urls))}\n", highlight=False, soft_wrap=True)
