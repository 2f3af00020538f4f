"""Every block of docs/CLIENTS.md does what the page says, with the unmodified client."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.clients.blocks import TERCET, offline_environ, run_blocks, sections
from tests.documentation.blocks import Block
from tests.e2e.harness import Tercet

# What the section's blocks print.
LIGHT = {
    "curl": r'"sentences":\[.*"text_completion".*"generated_text".*data: \{.*"id":"embedded"',
    "openai": r"\('The', None\)",
    "huggingface_hub": r"length \[-\d",
}
HEAVY = {
    "lm-evaluation-harness": r"word_perplexity\|↓\s*\|\s*\d+\.\d+",
    "llm": r"\w+ \w+",
    "litellm": r"(.+\n)+",
    "langchain": r"\w+",
}
# In test_editors.py, test_language_server.py, test_applications.py and tests/e2e/test_sagemaker.py.
ELSEWHERE = {"Neovim", "Helix", "Kate", "lsp-mode", "Emacs", "Continue", "Zed", "JupyterLab", "Open WebUI", "boto3"}


def test_every_section_is_run() -> None:
    assert set(sections()) == {*LIGHT, *HEAVY, *ELSEWHERE, "shell"}


@pytest.mark.parametrize("title", LIGHT)
def test_the_blocks_run(title: str, tercet: Tercet, tmp_path: Path) -> None:
    environ = offline_environ(tmp_path, Path(sys.executable).parent)
    printed = run_blocks(sections()[title], tmp_path, environ, {TERCET: tercet.url})
    assert re.search(LIGHT[title], printed, re.DOTALL), printed


@pytest.mark.parametrize("block", sections()["shell"], ids=["jq", "python", "any text"])
def test_a_line_of_shell_prints_three_suggestions(block: Block, tercet: Tercet, tmp_path: Path) -> None:
    if "jq" in block.text and not shutil.which("jq"):
        pytest.skip("jq is not installed")
    environ = offline_environ(tmp_path, Path(sys.executable).parent)
    lines = run_blocks([block], tmp_path, environ, {TERCET: tercet.url}).splitlines()
    assert len(lines) == 3, lines
    assert all(line.strip() for line in lines), lines


@pytest.mark.clients
@pytest.mark.parametrize("title", HEAVY)
def test_the_blocks_of_heavy_clients_run(title: str, tercet: Tercet, client_programs: Path, tmp_path: Path) -> None:
    environ = offline_environ(tmp_path, client_programs)
    printed = run_blocks(sections()[title], tmp_path, environ, {TERCET: tercet.url})
    assert re.search(HEAVY[title], printed), printed
