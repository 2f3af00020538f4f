"""The code blocks of README.md and docs/, and what a comment before a block says about its test.

A block without a comment is run by `test_commands.py`, as a reader would run it. A comment before it, or before the
first heading for all blocks of the page, has one of two forms:

    <!-- tested by tests/deploy/supervision/test_systemd.py -->
    <!-- not run: it needs an AWS account -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tests.e2e.harness import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHELL = {"sh", "bash"}
_COMMENT = re.compile(r"\s*<!-- (tested by|not run:) (.+?) -->\s*")
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """
    Attributes:
        section: the heading of the second level that it stands under, or "".
        language: "" if the block is indented, or its fence has none.
        file_name: under which the reader saves it, or "".
        test: the file of the test that the comment names, or "".
        reason: why it is not run, or "".
    """

    page: Path
    line: int
    section: str
    language: str
    file_name: str
    text: str
    test: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The page's code blocks."""
    of_page = of_block = ("", "")
    section, level = "", ""
    for token in _PARSER.parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block" and (found := _COMMENT.fullmatch(token.content)):
            of_block = (found[2], "") if found[1] == "tested by" else ("", found[2])
        elif token.type in {"fence", "code_block"}:
            assert token.map is not None
            test, reason = of_block if any(of_block) else of_page
            language, _, file_name = token.info.partition(" ")
            yield Block(page, token.map[0] + 1, section, language, file_name, token.content, test, reason)
            of_block = "", ""
        elif token.type == "heading_open":
            level = token.tag
            if level == "h1":
                of_page, of_block = of_block, ("", "")
        elif token.type == "inline" and level:
            section, level = token.content if level == "h2" else section, ""


def shell_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in SHELL]
