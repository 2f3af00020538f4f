"""`tercet lsp`: the command. It knows its options, and not the protocol."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from deploy.gateway_client import server_url
from shared.errors import StartError
from shared.extras import install_command
from shared.settings import Settings


def lsp(
    url: Annotated[
        str | None,
        typer.Option(
            callback=server_url,
            help="The server, like https://tercet.example, whatever the editor's settings say; default: their "
            "`tercet.url`, or else the server at TERCET_BIND's address.",
        ),
    ] = None,
    _stdio: Annotated[bool, typer.Option("--stdio", help="The only transport; many editors add this option.")] = False,
) -> None:
    """Serve suggestions to an editor, by the Language Server Protocol on standard input and output."""
    try:
        from deploy.clients.lsp.server import make_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"pygls", "lsprotocol"}:
            raise
        raise StartError(f"`tercet lsp` requires pygls, which is not installed: {install_command('lsp')}") from error
    if sys.stdin is None or sys.stdin.isatty():
        raise StartError("`tercet lsp` is started by an editor; docs/CLIENTS.md has the configurations.")
    # pygls logs messages with the text of documents in them, above the level of errors too.
    logging.getLogger("pygls").setLevel(logging.CRITICAL)
    make_server(Settings.load(os.environ), os.environ, url).protocol.run()
