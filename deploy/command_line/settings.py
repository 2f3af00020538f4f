"""`tercet settings`: every setting, and docs/SETTINGS.md."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from deploy.terminal import make_console
from shared.setting_values import without_passwords
from shared.settings import Settings

out = make_console()


def show_settings(
    markdown: Annotated[bool, typer.Option(help="Print docs/SETTINGS.md.")] = False,
) -> None:
    """List every setting: its default, unit and reason."""
    if markdown:
        sys.stdout.write(_page())
        return
    # No table: on a narrow terminal its columns would cut the names.
    for title, rows in Settings.reference():
        out.print(Text(title, "underline"), soft_wrap=True)
        for name, default, unit, reason in rows:
            facts = ", ".join(filter(None, (unit, f"default {default}")))
            out.print(Text.assemble((name, "bold"), f" ({facts})"), soft_wrap=True)
            out.print(Padding(Text(reason), (0, 0, 0, 4), expand=False))
            if name in os.environ:
                out.print(Text.assemble("    now ", (without_passwords(os.environ[name]), "bold")), soft_wrap=True)
    Settings.load(os.environ)


def _page() -> str:
    """docs/SETTINGS.md: a table for each group."""
    lines = [
        "<!-- written by deploy.command_line.settings -->",
        "# Settings",
        "",
        "Settings are environment variables. A relative path begins in the directory where `tercet` was started.",
        "`tercet settings` shows the present values; `tercet settings --markdown >docs/SETTINGS.md` writes this page.",
    ]
    for title, rows in Settings.reference():
        name, _, about = title.rstrip(".").partition(": ")
        lines += ["", f"## {name}", "", f"{about[0].upper()}{about[1:]}.", ""]
        lines += ["| setting | default | unit | why |", "|---|---|---|---|"]
        lines += [f"| `{row.variable}` | `{row.default}` | {row.unit} | {row.reason} |" for row in rows]
    return "\n".join(lines) + "\n"
