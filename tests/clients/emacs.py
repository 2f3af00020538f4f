"""Emacs in a terminal: keys are typed, and what it knows of a file is asked."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.harness import until
from tests.programs import run_program

START_S = 60


class Emacs:
    """A running Emacs that shows the file `notes`."""

    def __init__(self, editor: subprocess.Popen[bytes], socket: Path, notes: Path, environ: Mapping[str, str]) -> None:
        self._editor, self._socket, self._notes, self._environ = editor, socket, notes, environ

    def ask(self, expression: str) -> Any:
        """The value of an expression in the buffer of the file."""
        asked = f'(json-encode (with-current-buffer "{self._notes.name}" {expression}))'
        command = ["emacsclient", "-s", str(self._socket), "--eval", asked]
        return json.loads(json.loads(run_program(command, check=True, env=self._environ).stdout))

    def send(self, keys: str) -> None:
        assert self._editor.stdin
        self._editor.stdin.write(keys.encode())
        self._editor.stdin.flush()


@contextmanager
def running_emacs(notes: Path, environ: Mapping[str, str], options: Sequence[str] = ()) -> Iterator[Emacs]:
    """
    Args:
        environ: its HOME is the folder of the socket by which Emacs is asked.
    """
    socket = Path(environ["HOME"]) / "emacs"
    # Emacs does these in turn, so its socket appears when all is there.
    start = f'(progn (require (quote json)) (require (quote server)) (setq server-name "{socket}") (server-start))'
    command = ["emacs", "-nw", *options, str(notes), "--eval", start]
    with subprocess.Popen(
        ["script", "-qec", shlex.join(command), "/dev/null"],  # gives Emacs the terminal that it requires
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as editor:
        try:
            until(socket.exists, START_S, "Emacs's socket")
            yield Emacs(editor, socket, notes, environ)
        finally:
            editor.terminate()
