"""`python -m tests.documentation.written`, a part of `make docs`: writes the marked parts of the docs' pages.

A page has `<!-- written by MODULE: NAME -->`, the text that `MODULE.table(NAME)` returns, and `<!-- end -->`.
"""

from __future__ import annotations

import importlib
import re

from tests.sizes import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PART = re.compile(r"(<!-- written by ([\w.]+): ([^>]*) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


def write_parts(page: str) -> str:
    """The page with its parts as they are now."""
    return PART.sub(lambda part: f"{part[1]}{importlib.import_module(part[2]).table(part[3])}{part[4]}", page)


def main() -> None:
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if (written := write_parts(page)) != page:
            path.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
