"""What the command line prints is what it was given, also where it looks like rich's markup."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from deploy import cli
from deploy.terminal import labelled, make_console
from shared.errors import StartError

TEXTS = ["install -e '.[redis]'", "/models/[/x]", "[bold]a[/bold]", "[/]", ":sparkles:", r"\[x]"]


def printed(console: Console, *parts: object) -> str:
    console.file = file = io.StringIO()
    console.print(*parts, soft_wrap=True)
    return file.getvalue()


@pytest.mark.parametrize("text", TEXTS)
def test_strings_tables_labels_and_errors_are_printed_as_they_are(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console = make_console()
    assert printed(console, text) == f"{text}\n"
    assert printed(console, labelled("tercet:", "red", text)) == f"tercet: {text}\n"
    table = Table(text, title=text, box=None, pad_edge=False)
    table.add_row(text)
    assert printed(console, table).count(text) == 3

    def fail() -> None:
        raise StartError(text)

    monkeypatch.setattr(cli, "cli", fail)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err == f"tercet: {text}\n"
