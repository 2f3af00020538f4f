"""The corpus as the typist reads it: the same books as in training."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from shared.errors import StartError
from tests.bench.quality import corpus
from workers.training import corpus as training


def write_corpus(path: Path, *titles: str) -> Path:
    text = "".join(
        f"<|book|> A. Author - {title}\n\nText of {title}.\n\nIt has two paragraphs.\n\n" for title in titles
    )
    path.write_bytes(lzma.compress(text.encode()))
    return path


def test_books_are_those_of_training(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "corpus.xz", "Another", *training.HELD_OUT)
    _, held_out = training.split_books(training.read_books(path))
    assert corpus.HELD_OUT == training.HELD_OUT
    assert list(corpus.read_held_out(path)) == ["anne-of-avonlea.txt", "pragmatism.txt", "three-men-in-a-boat.txt"]
    expected = {f"{book.author} - {book.title}\n\n{book.text}" for book in held_out}
    assert set(corpus.read_held_out(path).values()) == expected


def test_a_corpus_without_a_held_out_book_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="must contain each of the held-out books"):
        corpus.read_held_out(write_corpus(tmp_path / "corpus.xz", "Another", *training.HELD_OUT[1:]))


@pytest.mark.parametrize("content", [b"no xz", lzma.compress(b"no mark"), lzma.compress(b"\xff")])
def test_a_file_of_another_format_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "corpus.xz").write_bytes(content)
    with pytest.raises(StartError, match=r"corpus\.xz"):
        corpus.read_held_out(tmp_path / "corpus.xz")
