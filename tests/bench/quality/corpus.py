"""The held-out books of the training corpus, which the model has not seen.

Knows the corpus's file format and which books are held out, as `workers.training.corpus` does; that program is imported
by nothing else (import-linter), so that no server loads it. Does not know tokenizers.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator
from pathlib import Path

from shared.errors import StartError

BOOK_MARK = "<|book|> "
HELD_OUT = ("Three Men in a Boat", "Anne of Avonlea", "Pragmatism")


def read_held_out(corpus: Path) -> dict[str, str]:
    """The held-out books by file name, as training writes them to `held-out/`, in the order of the names.

    Raises:
        StartError: the corpus cannot be read, or lacks a held-out book.
    """
    texts = {
        f"{title.lower().replace(' ', '-')}.txt": f"{heading}\n\n{text}"
        for heading, title, text in _books(corpus)
        if title in HELD_OUT
    }
    if len(texts) != len(HELD_OUT):
        raise StartError(f"--corpus {corpus} must contain each of the held-out books: {', '.join(HELD_OUT)}.")
    return dict(sorted(texts.items()))


def _books(corpus: Path) -> Iterator[tuple[str, str, str]]:
    """(heading, title, text) of each book. A book begins with a line `<|book|> Author - Title` and a blank line."""
    try:
        whole = lzma.decompress(corpus.read_bytes()).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise StartError(f"--corpus {corpus} cannot be read as text in xz ({error}).") from error
    before, *parts = re.split(rf"^{re.escape(BOOK_MARK)}", whole, flags=re.MULTILINE)
    if before.strip() or not parts:
        raise StartError(f"--corpus {corpus} does not begin with a line like {BOOK_MARK}Author - Title.")
    for part in parts:
        heading, _, text = part.partition("\n")
        yield heading, heading.partition(" - ")[2], text.strip()
