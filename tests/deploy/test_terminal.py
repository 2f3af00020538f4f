"""What the command line prints is what it was given, also where it looks like rich's markup."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from deploy import cli
from deploy.announcements import print_ready
from deploy.terminal import labelled, make_console
from shared.errors import StartError
from shared.plan import Model, Plan, Slot
from tests.deploy.test_cli import tercet
from tests.settings import make_settings
from tests.workers.helpers import EMBEDDED

TEXTS = ["install -e '.[redis]'", "/models/[/x]", "[bold]a[/bold]", "[/]", ":sparkles:", r"\[x]"]


def printed(console: Console, *parts: object) -> str:
    console.file = file = io.StringIO()
    console.print(*parts, soft_wrap=True)
    return file.getvalue()


@pytest.mark.parametrize("text", TEXTS)
def test_a_console_prints_strings_tables_and_labels_as_they_are(text: str) -> None:
    console = make_console(width=200)
    assert printed(console, text) == f"{text}\n"
    assert printed(console, labelled("tercet:", "red", text)) == f"tercet: {text}\n"
    table = Table(text, title=text, box=None, pad_edge=False)
    table.add_row(text)
    assert printed(console, table).count(text) == 3


@pytest.mark.parametrize("text", TEXTS)
def test_an_error_is_printed_whole(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise StartError(text)

    monkeypatch.setattr(cli, "cli", fail)
    monkeypatch.setattr(cli, "err", make_console(stderr=True))
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err == f"tercet: {text}\n"


def test_a_model_directory_with_brackets_is_named_whole(tmp_path: Path) -> None:
    absent = tmp_path / "[/x]"
    environ = {"TERCET_RUN_DIR": str(tmp_path / "run"), "TERCET_DEVICES": "cpu", "TERCET_MODELS": f"x={absent}"}
    done = tercet("plan", **environ)
    assert done.returncode == 1
    assert f"{absent}, which is not a directory" in done.stderr
    shutil.copytree(EMBEDDED, absent)
    shown = tercet("plan", **environ)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert str(absent) in shown.stdout


@pytest.mark.parametrize("failed", [{}, {0: "The checkpoint in /models/[/x] is damaged."}])
def test_the_announcement_has_names_and_reasons_whole(failed: dict[int, str]) -> None:
    model = Model(name="x[y]", directory="/models/[/x]", source="directory", n_ctx=1024, vocab_size=8)
    plan = Plan({}, [model], [Slot(index=0, device="cpu", model=model.name, socket="", max_batch=1)])
    console = make_console(width=200)
    console.file = file = io.StringIO()
    print_ready(console, make_settings(tls_cert=Path("/[red]/cert"), tls_key=Path("/key")), plan, ("gateway",), failed)
    text = file.getvalue()
    assert "(x[y] × 1). Serving at https://127.0.0.1:8000; Ctrl-C stops." in text
    assert "--cacert '/[red]/cert'" in text
    assert all(f"x[y] on cpu) is not warm and tries again: {reason}\n" in text for reason in failed.values())
