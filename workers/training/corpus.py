"""The training corpus: books as one stream of token ids, and the held-out books for evaluation.

Knows the corpus's file format, the filter, and tokenizer training. Does not know models or training steps.

The results are cached in the run directory: `tokens.npy`, `tokenizer.json`, `tokenizer_config.json`, `corpus.json`.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from shared.errors import StartError
from workers.text.tokenizer import END_OF_TEXT
from workers.training.schedule import Settings, Tokens

BOOK_MARK = "<|book|> "
# Three genres (comic, children's, philosophy). Neither the model nor the tokenizer is trained on them.
HELD_OUT = ("Three Men in a Boat", "Anne of Avonlea", "Pragmatism")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
END_ID = 0

# Ethnic slurs, and words that were mostly used as such; a paragraph that contains one is dropped. Stems match at the
# start of a word, words as a whole with an optional plural, so that niggardly, squawk, injunction, Japan, spice and
# hundred pass. Meaning is not considered: a raccoon called coon and light through a chink are dropped as well.
STEMS = (
    *("nigger", "niggah", "nigra", "negro", "negress", "darkie", "darkey", "pickaninn", "piccaninn", "mulatto"),
    *("quadroon", "octoroon", "blackamoor", "hottentot", "kaffir", "chinam", "coolie", "injun(?!ct)", "redskin"),
    *("half-?breed", "half-?caste", "heathen", "savages", "savagery", "gipsy", "gipsies", "gypsy", "gypsies", "jewboy"),
)
WORDS = (
    *("darky", "coon", "chink", "jap", "dago", "dagoe", "kike", "wop", "spick", "gook", "squaw", "greaser", "sheeny"),
    *("sheenie", "sambo", "polack", "bohunk", "gringo", "lascar", "faggot", "papoose", "limey", "wog", "yid"),
)
SLUR = re.compile(rf"\b(?:(?:{'|'.join(STEMS)})|(?:{'|'.join(WORDS)})s?\b)", re.IGNORECASE)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Book:
    """A book without its heading."""

    author: str
    title: str
    paragraphs: list[str]

    @property
    def text(self) -> str:
        """The book, with a blank line between its paragraphs."""
        return "\n\n".join(self.paragraphs)

    def without_slurs(self) -> Book:
        """The book without the paragraphs that contain a slur."""
        return replace(self, paragraphs=[each for each in self.paragraphs if not SLUR.search(each)])


@dataclass(frozen=True, slots=True)
class Corpus:
    """`tokens` is the memory-mapped stream, `[num_tokens]`: id 0, then a book, for each book. `facts` is for the model
    card."""

    tokens: Tokens
    tokenizer: BpeTokenizer
    held_out: list[Book]
    facts: dict[str, Any]


def read_books(path: Path) -> list[Book]:
    """All books of an xz file: each begins with a line `<|book|> Author - Title` and a blank line.

    Raises:
        StartError: the file cannot be read or has another format.
    """
    try:
        text = lzma.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise StartError(f"{path} cannot be read as text in xz: {error}.") from error
    before, *parts = re.split(rf"^{re.escape(BOOK_MARK)}", text, flags=re.MULTILINE)
    if before.strip() or not parts:
        raise StartError(f"{path} does not begin with a line like {BOOK_MARK}Author - Title.")
    books = []
    for part in parts:
        heading, _, text = part.partition("\n")
        author, _, title = heading.partition(" - ")
        books.append(Book(author, title, text.strip().split("\n\n")))
    return books


def prepare(path: Path, run: Path, settings: Settings, say: Say) -> Corpus:
    """Tokenize the corpus at `path`, or read the run directory's cache if it was made from the same inputs.

    Args:
        run: the run directory.
        settings: the seed shuffles the books; the tokenizer is that of the checkpoint to continue from, or trained.
        say: receives what is being done.

    Raises:
        StartError: the corpus cannot be read or lacks a held-out book.
    """
    key = {name: getattr(settings, name) for name in ("corpus_sha256", "seed", "vocab_size", "n_positions")}
    key |= {"filter": SLUR.pattern, "held_out": list(HELD_OUT)}
    if settings.continue_from is not None:
        key["tokenizer"] = digest(Path(settings.continue_from, "tokenizer.json"))
    books, held_out = split_books(read_books(path))
    facts_path = run / "corpus.json"
    facts = json.loads(facts_path.read_text(encoding="utf-8")) if facts_path.is_file() else {}
    if facts.get("key") != key:
        facts_path.unlink(missing_ok=True)  # first, so that an interrupted run leaves no partial cache that looks valid
        facts = _make(books, run, settings, say)
        write_text(facts_path, json.dumps({"key": key, **facts}, indent=1, ensure_ascii=False))
    return Corpus(
        np.load(run / "tokens.npy", mmap_mode="r"),
        BpeTokenizer.from_file(str(run / "tokenizer.json")),
        held_out,
        facts,
    )


def split_books(books: Sequence[Book]) -> tuple[list[Book], list[Book]]:
    """(books for training, held-out books in the order of `HELD_OUT`).

    Raises:
        StartError: a held-out book is missing or not unique; training on it unnoticed would falsify the evaluation.
    """
    held_out = [book for title in HELD_OUT for book in books if book.title == title]
    if len(held_out) != len(HELD_OUT):
        raise StartError(f"The corpus must contain each of the held-out books once: {HELD_OUT}.")
    return [book for book in books if book.title not in HELD_OUT], held_out


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Train GPT-2's byte-level BPE. `<|endoftext|>` is id 0, the 256 bytes follow."""
    bpe = BpeTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def encode(bpe: BpeTokenizer, text: str) -> Tokens:
    """Id 0, which begins every book, then the text's token ids, `[num_tokens + 1]`."""
    return np.array([END_ID, *bpe.encode(text, add_special_tokens=False).ids], dtype=np.uint16)


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the whole new text."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _make(books: list[Book], run: Path, settings: Settings, say: Say) -> dict[str, Any]:
    from transformers import PreTrainedTokenizerFast

    random.Random(settings.seed).shuffle(books)
    say("Dropping paragraphs with slurs")
    train = [book.without_slurs() for book in books]
    if settings.continue_from is not None:
        for name in TOKENIZER_FILES:
            shutil.copyfile(Path(settings.continue_from, name), run / name)
    else:
        say(f"Training a tokenizer of {settings.vocab_size} tokens")
        bpe = train_tokenizer((book.text for book in train), settings.vocab_size)
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=settings.n_positions, **special)
        tokenizer.save_pretrained(run)
    bpe = BpeTokenizer.from_file(str(run / "tokenizer.json"))
    num_dropped = [len(book.paragraphs) - len(kept.paragraphs) for book, kept in zip(books, train, strict=True)]
    parts = []
    for number, book in enumerate(train, 1):
        say(f"Tokenizing book {number} of {len(train)}: {book.title}")
        parts.append(encode(bpe, book.text))
    tokens = np.concatenate(parts)
    np.save(run / "tokens.npy", tokens)
    return {
        "books": [
            {"author": book.author, "title": book.title, "tokens": len(part) - 1, "paragraphs_dropped": dropped}
            for book, part, dropped in zip(train, parts, num_dropped, strict=True)
        ],
        "num_tokens": len(tokens),
        "num_characters": sum(len(book.text) for book in train),
        "num_paragraphs": sum(len(book.paragraphs) for book in books),
        "num_paragraphs_dropped": sum(num_dropped),
    }


def digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        StartError: it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}.") from error
