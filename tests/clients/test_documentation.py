"""Every block of docs/CLIENTS.md does what the page says, with the unmodified client."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.clients.blocks import SAGEMAKER, TERCET, offline_environ, run_blocks, sections
from tests.e2e.harness import Tercet

# What the section's blocks print.
LIGHT = {
    "curl": r'"sentences":\[.*"text_completion".*"generated_text".*data:\{.*"output":\[".*"id":"embedded"',
    "openai": r"\('The', None\)",
    "huggingface_hub": r"length \[-\d",
    "boto3": r"\['.+', '.+', '.+'\]",
}
HEAVY = {
    "lm-evaluation-harness": r"word_perplexity\|↓\s*\|\s*\d+\.\d+",
    "llm": r"\w+ \w+",
    "litellm": r"(.+\n)+",
    "langchain": r"\w+",
}
# Their plug-ins run in an editor: tests/clients/test_editors.py.
EDITORS = {"minuet-ai.nvim", "Continue"}


def test_every_section_is_run() -> None:
    assert set(sections()) == {*LIGHT, *HEAVY, *EDITORS}


@pytest.mark.parametrize("title", LIGHT)
def test_the_blocks_run(title: str, tercet: Tercet, sagemaker_url: str, tmp_path: Path) -> None:
    environ = offline_environ(tmp_path, Path(sys.executable).parent)
    addresses = {TERCET: tercet.url, SAGEMAKER: sagemaker_url}
    printed = run_blocks(sections()[title], tmp_path, environ, addresses)
    assert re.search(LIGHT[title], printed, re.DOTALL), printed


@pytest.mark.clients
@pytest.mark.parametrize("title", HEAVY)
def test_the_blocks_of_heavy_clients_run(title: str, tercet: Tercet, client_programs: Path, tmp_path: Path) -> None:
    environ = offline_environ(tmp_path, client_programs)
    printed = run_blocks(sections()[title], tmp_path, environ, {TERCET: tercet.url})
    assert re.search(HEAVY[title], printed), printed
