"""`tercet lsp` in editors, configured as docs/CLIENTS.md says: real ones where a package index has them.

Debian has Emacs with lsp-mode, and Kate. A raw client that behaves as the sources of Neovim and Helix say is in
tests/e2e/test_lsp.py; here their configurations are read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.clients.blocks import saved_file
from tests.clients.emacs import running_emacs
from tests.e2e.harness import Tercet, metric, until
from tests.e2e.test_lsp import HELIX, NEOVIM
from tests.lsp_client import LspClient
from tests.programs import run_program

# What ends this word is as probable and as useful as the defaults ask for; only such a word is offered unasked.
TYPED = "extra"
OPENING = f"It was an {TYPED}"
LSP_MODE = Path("/usr/share/emacs/site-lisp/elpa-src")


def editor_environ(tercet: Tercet, home: Path) -> dict[str, str]:
    """The environment of an editor for which the server under test is this machine's, and that finds `tercet`."""
    settings = {name: value for name, value in tercet.environ.items() if name.startswith("TERCET_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**settings, "PATH": path, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "TERM": "xterm"}


def missing(*programs: str) -> list[str]:
    return [program for program in programs if not shutil.which(program)]


def test_the_configurations_of_neovim_and_helix_start_the_server(tercet: Tercet, tmp_path: Path) -> None:
    helix = tomllib.loads(saved_file("Helix", tmp_path, tercet.url).read_text())
    server = helix["language-server"]["tercet"]
    assert helix["language"][0]["language-servers"] == ["tercet"]
    assert [server["command"], *server["args"]] == ["tercet", "lsp"]
    assert 'cmd = { "tercet", "lsp" }' in saved_file("Neovim", tmp_path, tercet.url).read_text()
    with LspClient(HELIX, environ=tercet.environ, initial=server["config"], settings=None) as client:
        client.open(OPENING)
        assert client.complete(0, len(OPENING))
        assert client.shown == []
    with LspClient(NEOVIM, environ=tercet.environ, settings={"mode": "live"}) as client:
        client.open(OPENING)
        assert client.inline(0, len(OPENING))
        assert client.shown == []


@pytest.mark.skipif(
    bool(missing("emacs", "emacsclient", "script")) or not [*LSP_MODE.glob("lsp-mode-*"), *LSP_MODE.glob("company-*")],
    reason="Emacs with lsp-mode is not installed (apt-get install emacs-nox elpa-lsp-mode elpa-company)",
)
def test_emacs_lists_words_and_reports_the_accepted_one(tercet: Tercet, tmp_path: Path) -> None:
    """Emacs in a terminal: a text is typed, the list is read, and M-n and Enter choose and accept."""
    (tmp_path / ".emacs.d").mkdir()
    init = saved_file("lsp-mode", tmp_path, tercet.url).read_text()
    init = init.replace(":server-id", ":initialization-options '(:minProbability 0 :minUsefulness 0) :server-id")
    (tmp_path / ".emacs.d/init.el").write_text(init)  # as documented, but with several words to choose from
    notes = tmp_path / "docs" / "notes.txt"
    notes.parent.mkdir()
    before = metric(tercet, "tercet_saved_characters_total")
    with running_emacs(notes, editor_environ(tercet, tmp_path)) as emacs:
        status = "(seq-some (lambda (each) (eq 'initialized (lsp--workspace-status each))) (lsp-workspaces))"
        until(lambda: emacs.ask(status), 60, "the language server")
        emacs.send(OPENING)
        words = until(lambda: emacs.ask("company-candidates"), 30, "a list of words")
        assert all(word.startswith(TYPED) for word in words)
        emacs.send("\x1bn")
        until(lambda: emacs.ask("company-selection") == 1, 30, "the second word")
        emacs.send("\r")
        accepted = OPENING.removesuffix(TYPED) + words[1]
        until(lambda: emacs.ask("(buffer-string)") == accepted, 30, "the accepted word")
        num_accepted = len(words[1]) - len(TYPED)
        until(lambda: metric(tercet, "tercet_saved_characters_total") - before == num_accepted, 30, "its report")


@pytest.mark.skipif(
    bool(missing("kate", "Xvfb", "xdotool")),
    reason="Kate, an X server or xdotool is not installed (apt-get install kate xvfb xdotool)",
)
def test_kate_lists_words_and_inserts_one(tercet: Tercet, tmp_path: Path) -> None:
    """Kate on an X server without a screen: a text is typed, and Enter accepts the first word of the list."""
    folder = tmp_path / ".config/kate/lspclient"
    folder.mkdir(parents=True)
    shutil.copy(saved_file("Kate", tmp_path, tercet.url), folder)
    notes = tmp_path / "notes.md"
    notes.write_text("")
    read, write = os.pipe()
    display = subprocess.Popen(
        ["Xvfb", "-displayfd", str(write), "-screen", "0", "1000x700x24"], pass_fds=[write], stderr=subprocess.DEVNULL
    )
    os.close(write)
    with os.fdopen(read) as number:
        environ = {**editor_environ(tercet, tmp_path), "DISPLAY": f":{number.readline().strip()}"}
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    environ["XDG_RUNTIME_DIR"] = str(runtime)
    # No session bus: in 3 of 10 runs Kate lost its window soon after its start, without one in none of 8.
    environ["DBUS_SESSION_BUS_ADDRESS"] = f"unix:path={runtime}/none"

    def do(*arguments: str) -> str:
        done = run_program(["xdotool", *arguments], env=environ)
        return done.stdout.strip().partition("\n")[0]

    def window(name: str) -> str:
        return do("search", "--onlyvisible", "--name", name)

    editor = subprocess.Popen(
        ["kate", "--new", "--startanon", str(notes)],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def saved() -> str:
        do("key", "ctrl+s")
        time.sleep(0.2)
        return notes.read_text().rstrip("\n")

    try:
        main = until(lambda: window("notes.md"), 60, "Kate's window")
        question = until(lambda: window("LSP server start requested"), 60, "Kate's question")
        do("windowfocus", "--sync", question)
        do("key", "--window", question, "alt+y")
        until(lambda: not window("LSP server start requested"), 30, "the answer")

        def is_typed() -> bool:
            """Kate takes the focus back while it starts, so that keys may be lost."""
            do("windowfocus", "--sync", main)
            do("mousemove", "500", "300", "click", "1")
            do("key", "ctrl+a")
            do("type", "--delay", "40", OPENING)
            return saved() == OPENING

        until(is_typed, 60, "the typed text in the file")
        # The server starts meanwhile: the last letter is typed anew until Kate lists the words for it.
        deadline = time.monotonic() + 60
        text = OPENING
        while time.monotonic() < deadline and not (text.startswith(OPENING) and text != OPENING):
            do("key", "BackSpace")
            do("key", TYPED[-1])
            time.sleep(1)
            do("key", "Return")
            text = saved()
            if text.endswith("\n") or text == OPENING:  # no list: Enter began a line
                do("key", "BackSpace")
                text = saved()
        assert text.startswith(OPENING), text
        assert len(text) > len(OPENING)
    finally:
        for process in (editor, display):
            process.kill()  # Kate would ask whether to save
            process.wait()
