"""`tercet settings`: every setting, and the table of docs/SETTINGS.md."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from deploy.terminal import make_console
from shared.settings import Settings

out = make_console()


def show_settings(
    markdown: Annotated[bool, typer.Option(help="Print the table of docs/SETTINGS.md.")] = False,
) -> None:
    """List every setting: its default, unit and reason."""
    rows = Settings.table()
    if markdown:
        lines = ["| setting | default | unit | why |", "|---|---|---|---|"]
        lines += [f"| `{name}` | `{default}` | {unit} | {why} |" for name, default, unit, why in rows]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    # No table: on a narrow terminal its columns would cut the names.
    for name, default, unit, why in rows:
        facts = ", ".join(filter(None, (unit, f"default {default}")))
        out.print(Text.assemble((name, "bold"), f" ({facts})"), soft_wrap=True)
        out.print(Padding(Text(why), (0, 0, 0, 4)))
        if name in os.environ:
            out.print(Text.assemble("    now ", (os.environ[name], "bold")), soft_wrap=True)
    Settings.load(os.environ)
