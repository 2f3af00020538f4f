"""Consoles of the command line, which print every string as it is.

rich takes `[…]` in a string for markup: it would drop `[redis]` from a message and fail at a path like `/models/[/x]`.
Messages, paths and names come from users and other programs, so markup is off; a style is given to a `Text` instead.
Where the output is no terminal, rich would assume 80 columns and cut the paths of a table.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

FILE_WIDTH = 10_000  # columns; a table takes those that it needs


def make_console(*, stderr: bool = False, width: int | None = None, record: bool = False) -> Console:
    """A console that knows neither markup nor emoji codes, in tables as well.

    Args:
        width: in columns. None is the terminal's; a pipe or a file has room for every line.
    """
    stream = sys.stderr if stderr else sys.stdout
    if width is None and not stream.isatty() and "COLUMNS" not in os.environ:
        width = FILE_WIDTH
    return Console(stderr=stderr, width=width, record=record, markup=False, emoji=False)


def labelled(label: str, style: str, text: str) -> Text:
    """`text` after a label that stands out."""
    return Text.assemble((label, style), " ", text)


def json_lines(value: Any) -> bytes:
    """A value as JSON, indented, with a last line break: for scripts, and for people."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
