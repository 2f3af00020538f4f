"""Code and docs use the field's words; words that are not vocabulary stand in a few lines at most.

The list is a heuristic: it finds words, a reader judges sentences.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 10
_WORDS = re.compile(
    r"\b(told|heard|whoever|nobody|somebody|so many|(?:is|are|was|were) asked for|goes on|go on|gone on|beside it"
    r"|by hand|knock\w*|(?:rings?|rang) (?:the|a) bell|ledgers?|tastes?)\b",
    re.IGNORECASE,
)
# Samples of generated text, the text that is served, and this file.
_OTHERS_WORDS = {
    "docs/QUALITY.md",
    "workers/checkpoints/embedded/README.md",
    "workers/checkpoints/page.txt",
    "workers/training/openings.txt",
    "tests/test_language.py",
}


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    suffixes = {".py", ".js", ".css", ".html", ".md", ".toml", ".conf", ""}
    names = [name for name in listed.stdout.splitlines() if name not in _OTHERS_WORDS and name != "LICENSE"]
    return [ROOT / name for name in names if Path(name).suffix in suffixes]


def test_words_that_are_not_vocabulary_are_rare() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        if path.is_file()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        # Prose that tests send to the server is not ours.
        if _WORDS.search(line) and not (path.is_relative_to(ROOT / "tests") and '"' in line)
    ]
    assert len(found) <= MAX_LINES, "\n".join(found)
