"""Runs the fenced blocks of docs/CLIENTS.md, as a reader would: in order, in one directory per section.

Knows no client. A block whose info string has a second word is saved as a file of that name; bash and Python blocks
run. The addresses of the page are replaced by those of the servers under test, and nothing else is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from tests.documentation.blocks import Block, blocks
from tests.programs import run_program

PAGE = Path(__file__).parents[2] / "docs/CLIENTS.md"
TERCET, SAGEMAKER = "http://127.0.0.1:8000", "http://127.0.0.1:8080"
# curl succeeds on an error status unless it is asked not to.
_PRELUDE = 'set -eu\ncurl() { command curl --fail-with-body --silent --show-error "$@"; echo; }\n'


def sections() -> dict[str, list[Block]]:
    """The page's blocks by the title of their section."""
    return {title: list(own) for title, own in groupby(blocks(PAGE), lambda block: block.section)}


def offline_environ(home: Path, bin_directory: Path) -> dict[str, str]:
    """An environment in which a client finds the programs of `bin_directory` first and no network beyond loopback."""
    return {
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LLM_USER_PATH": str(home),
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        **{f"{scheme}_PROXY": "http://127.0.0.1:9" for scheme in ("HTTP", "HTTPS", "ALL")},  # where no server listens
    }


def run_blocks(chosen: list[Block], home: Path, environ: Mapping[str, str], addresses: Mapping[str, str]) -> str:
    """Save or run a section's blocks; returns what they printed.

    Raises:
        AssertionError: a block failed.
    """
    printed = ""
    for block in chosen:
        text = block.text
        for documented, served in addresses.items():
            text = text.replace(documented, served)
        if block.file_name:
            (home / block.file_name).write_text(text)
        elif block.language in {"bash", "python"}:
            command = ["bash", "-c", _PRELUDE + text] if block.language == "bash" else ["python", "-c", text]
            printed += run(command, home, environ)
        else:
            raise AssertionError(f"a {block.language} block has no file name")
    return printed


def saved_file(title: str, home: Path, url: str) -> Path:
    """Save a section's only block, a file, with the address of Tercet."""
    [block] = sections()[title]
    run_blocks([block], home, {}, {TERCET: url})
    return home / block.file_name


def run(command: list[str], home: Path, environ: Mapping[str, str], timeout_s: float = 240) -> str:
    """What a command printed to its standard output.

    Raises:
        AssertionError: it failed; the message holds all that it printed.
    """
    done = run_program(command, cwd=home, env=environ, timeout=timeout_s)
    assert done.returncode == 0, f"{command[0]}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
