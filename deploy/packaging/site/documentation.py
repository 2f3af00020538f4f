"""`make site`: builds the documentation as a site, whose search asks no other server, into build/site.

The site's pages lie where they lie in the repository, so every relative link works in both. A broken link or anchor
fails the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "build/site-source"
CONFIG = Path(__file__).parent / "mkdocs.yml"
FIRST = "README.md"
_PARSER = MarkdownIt("commonmark").enable("table")
# A file name after the language: the reader saves the block under it.
_FILE_NAME = re.compile(r"^( *```\w+) (\S+)$", re.MULTILINE)


def linked_files(page: Path) -> list[Path]:
    """Files of the repository that a page links to or shows."""
    found = []
    for token in _PARSER.parse(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            target = str(child.attrs.get("href", "") or child.attrs.get("src", ""))
            path = page.parent / target.partition("#")[0]
            if "://" not in target and not target.startswith("#") and path.is_file():
                found.append(path.resolve())
    return found


def stage(source: Path) -> list[Path]:
    """Copy README.md and all that it and its links link to; returns the files, relative to the repository."""
    shutil.rmtree(source, ignore_errors=True)
    files = [ROOT / FIRST]
    for path in files:  # grows meanwhile
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            copy.write_text(_FILE_NAME.sub(r'\1 title="\2"', path.read_text(encoding="utf-8")), encoding="utf-8")
            files += [linked for linked in linked_files(path) if linked not in files]
        else:
            shutil.copy(path, copy)
    return [path.relative_to(ROOT) for path in files]


def render(source: Path, site: Path) -> None:
    """
    Raises:
        subprocess.CalledProcessError: a page has a broken link, or mkdocs warns of something else.
    """
    options = ["--strict", "--config-file", str(CONFIG), "--site-dir", str(site.resolve())]
    # The second is an advertisement.
    environ = os.environ | {"TERCET_SITE_SOURCE": str(source.resolve()), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", *options]
    subprocess.run(command, env=environ, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    stage(SOURCE)
    try:
        render(SOURCE, Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.stdout}{error.stderr}")
    sys.stdout.write(f"python3 -m http.server --bind 127.0.0.1 --directory {sys.argv[1]} 8001\n")
