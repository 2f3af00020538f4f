"""Consoles of the command line, which print every string as it is.

rich takes `[…]` in a string for markup: it would drop `[redis]` from a message and fail at a path like `/models/[/x]`.
Messages, paths and names come from users and other programs, so markup is off; a style is given to a `Text` instead.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def make_console(*, stderr: bool = False, width: int | None = None, record: bool = False) -> Console:
    """A console that knows neither markup nor emoji codes, in tables as well."""
    return Console(stderr=stderr, width=width, record=record, markup=False, emoji=False)


def labelled(label: str, style: str, text: str) -> Text:
    """`text` after a label that stands out."""
    return Text.assemble((label, style), " ", text)
