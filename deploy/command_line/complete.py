"""`tercet complete`: completes a text with a running server."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.table import Table
from rich.text import Text

from deploy.gateway_client import gateway_client, needs_https, server_url, tls_problem
from deploy.terminal import make_console
from shared.errors import StartError
from shared.settings import Settings

NUM_LIKELIEST = 5
# A web font would make each viewer's browser contact the host of the font.
SVG_WITHOUT_WEB_FONTS = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def complete(
    text: Annotated[str, typer.Argument(help="The text to complete.")],
    samples: Annotated[int, typer.Option("-n", "--samples", help="Number of sentences, 1 to 8.")] = 3,
    length: Annotated[int, typer.Option(help="Maximum tokens per sentence.")] = 20,
    temperature: Annotated[float, typer.Option(help="0 to 5; 0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of a served model.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            callback=server_url, help="The server, like https://tercet.example; default: at TERCET_BIND's address."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the response as JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show the most likely tokens at each step.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also save the output as an SVG image.")] = None,
) -> None:
    """Complete a text with a running server."""
    settings = Settings.load(os.environ)
    body: dict[str, Any] = {"context": text, "n_samples": samples, "length": length, "temperature": temperature}
    if explain:
        body["explain"] = NUM_LIKELIEST
    body |= {name: value for name, value in (("seed", seed), ("model_size", model)) if value is not None}
    with gateway_client(settings, os.environ, url, settings.limits.timeout_s + 5) as client:
        answer = _post(client, url, "/autocomplete", body)
    if as_json:
        make_console().print_json(json.dumps(answer))
        return
    page = make_console(record=svg is not None, width=100 if svg else None)
    for sentence in answer["sentences"]:
        page.print(Text.assemble((text, "dim"), (sentence["value"], "bold"), end="\n\n"))
        if explain:
            page.print(_explanation(sentence), end="\n\n")
    if not answer["sentences"]:
        page.print(f"No completion was worth showing: {answer['errors'][0]['detail']}", highlight=False)
    replay = f"--seed {answer['seed']} reproduces it"
    page.print(Text(f"{answer['model']}, {answer['time'] * 1e3:.0f} ms, {replay}", "dim"))
    if svg:
        page.save_svg(str(svg), title=f'tercet complete "{text}"', code_format=SVG_WITHOUT_WEB_FONTS)


def _explanation(sentence: dict[str, Any]) -> Table:
    """The sampled tokens, their probabilities, and the most likely tokens of each step."""
    table = Table(
        "token", "probability", "most likely", title=f"seed {sentence['seed']}, score {sentence['score']:.3f}"
    )
    for token in sentence["explanation"]:
        likeliest = "  ".join(f"{text!r} {math.exp(logprob):.0%}" for text, logprob in token["likeliest"])
        table.add_row(Text(repr(token["text"])), f"{math.exp(token['logprob']):.1%}", Text(likeliest))
    return table


def _post(client: httpx.Client, url: str | None, path: str, body: object) -> dict[str, Any]:
    """The gateway's response to a request.

    Args:
        url: the server's as the user named it; None: this instance's own.

    Raises:
        StartError: no server answers, it is not Tercet, or it refuses the request.
    """
    address = str(client.base_url).rstrip("/")
    try:
        response = client.post(path, json=body)
    except httpx.TransportError as error:
        if problem := tls_problem(error, url):
            raise StartError(f"The server at {address} {problem}") from error
        raise StartError(
            f"No server answers at {address} ({error}): start it with `tercet serve`, or name another with --url."
        ) from error
    except ValueError as error:
        raise StartError("The request cannot be sent: a text is not UTF-8, or a number is not finite.") from error
    if url is None and needs_https(response):
        raise StartError(
            f"The server at {address} serves HTTPS: set TERCET_TLS_CERT as in the environment of `tercet serve`, or "
            "name it with --url https://…"
        )
    try:
        answer = msgspec.json.decode(response.content, type=dict[str, Any])
        detail = None if response.is_success and "sentences" in answer else answer["detail"]
    except (msgspec.DecodeError, KeyError) as error:
        raise StartError(f"The server at {address} is not Tercet (its status: {response.status_code}).") from error
    if response.status_code == 401:
        raise StartError(f"{detail} Here, set TERCET_API_KEY.")
    if detail is not None:
        raise StartError(detail)
    return answer
