"""The command line: `tercet --help` lists its commands.

A command's module is imported when the command is used: `tercet serve` runs as long as the server, and keeps no other
command in memory.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deploy.terminal import labelled, make_console
from shared.errors import StartError
from shared.process import open_standard_streams
from shared.version import tercet_version

# In the order of `tercet --help`: a function, or a group of commands.
COMMANDS = {
    "serve": "deploy.command_line.serve:serve",
    "plan": "deploy.command_line.plan:plan",
    "tune": "deploy.tuning.tune.tune_command:tune",
    "doctor": "deploy.command_line.doctor:doctor",
    "health": "deploy.command_line.health:health",
    "reload": "deploy.supervision.rolling_reload:reload",
    "key": "deploy.command_line.key:key_commands",
    "settings": "deploy.command_line.settings:show_settings",
    "complete": "deploy.command_line.complete:complete",
    "lsp": "deploy.clients.lsp.lsp_command:lsp",
    "deploy": "deploy.cloud.aws.deploy_commands:deploy_commands",
}


class LazyGroup(TyperGroup):
    """Imports a command when it is looked up. Commands and contexts are click's, which typer does not export."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            # For an unknown name all are imported, because the error suggests the nearest.
            for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:
                self.commands[name] = _import_command(name)
        return self.commands.get(cmd_name)


def _import_command(name: str) -> Any:
    module, _, attribute = COMMANDS[name].partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(name)(function)
    command = typer.main.get_command(found)
    command.name = name
    return command


cli = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Self-hosted autocompletion: three completions for every pause.",
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        sys.stdout.write(f"tercet {tercet_version()}\n")
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """The options before the command."""


def main() -> None:
    """Run the command line. A `StartError` is printed as one sentence, with exit code 1."""
    open_standard_streams()
    try:
        cli()
    except StartError as error:
        err = make_console(stderr=True)
        err.print(labelled("tercet:", "red", str(error)), soft_wrap=True)
        sys.exit(1)
