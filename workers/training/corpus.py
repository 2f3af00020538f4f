"""The books that the embedded checkpoint learns from, as one stream of token ids; and those kept to measure on.

Knows the corpus' format, what is left out of it, and byte-level BPE. Refuses to know models and steps.

A run directory caches what is made here: `tokens.npy`, `tokenizer.json`, `tokenizer_config.json`, `corpus.json` and
`held-out/*.txt`.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from shared.errors import StartError
from workers.text.tokenizer import END_OF_TEXT

BOOK_MARK = "<|book|> "
# Of three kinds (comic, children's, philosophy); neither model nor tokenizer sees them.
HELD_OUT = ("Three Men in a Boat", "Anne of Avonlea", "Pragmatism")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
END_ID = 0

# Words for peoples that insult them, or did in most mouths of the time; a paragraph with one of them is dropped whole.
# Stems match at a word's beginning, whole words with an optional plural; written so that niggardly, squawk, injunction,
# Japan, spice and hundred pass. It knows no meanings: a raccoon called coon and a light through a chink go as well.
STEMS = (
    "nigger", "niggah", "nigra", "negro", "negress", "darkie", "darkey", "pickaninn", "piccaninn", "mulatto",
    "quadroon", "octoroon", "blackamoor", "hottentot", "kaffir", "chinam", "coolie", "injun(?!ct)", "redskin",
    "half-?breed", "half-?caste", "heathen", "savages", "savagery", "gipsy", "gipsies", "gypsy", "gypsies", "jewboy",
)  # fmt: skip
WORDS = (
    "darky", "coon", "chink", "jap", "dago", "dagoe", "kike", "wop", "spick", "gook", "squaw", "greaser", "sheeny",
    "sheenie", "sambo", "polack", "bohunk", "gringo", "lascar", "faggot", "papoose", "limey", "wog", "yid",
)  # fmt: skip
SLUR = re.compile(rf"\b(?:(?:{'|'.join(STEMS)})|(?:{'|'.join(WORDS)})s?\b)", re.IGNORECASE)

Tokens = NDArray[np.uint16]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Book:
    """`text` has its paragraphs parted by one blank line, and no heading."""

    author: str
    title: str
    text: str
    num_paragraphs: int
    num_dropped: int = 0

    def without_slurs(self) -> Book:
        paragraphs = self.text.split("\n\n")
        kept = [paragraph for paragraph in paragraphs if not SLUR.search(paragraph)]
        return Book(self.author, self.title, "\n\n".join(kept), len(paragraphs), len(paragraphs) - len(kept))


@dataclass(frozen=True, slots=True)
class Corpus:
    """`tokens` is the memory-mapped stream `[num_tokens]`: id 0, a book, id 0, the next; `facts` is for the card."""

    tokens: Tokens
    tokenizer: BpeTokenizer
    held_out: list[Book]
    facts: dict[str, Any]


def read_books(path: Path) -> list[Book]:
    """All books of an xz file: each begins with a line `<|book|> Author - Title` and a blank line.

    Raises:
        StartError: it cannot be read, or is not such a file.
    """
    try:
        text = lzma.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise StartError(f"{path} cannot be read as text in xz: {error}.") from error
    before, *parts = re.split(rf"^{re.escape(BOOK_MARK)}", text, flags=re.MULTILINE)
    if before.strip() or not parts:
        raise StartError(f"{path} does not begin with a line like {BOOK_MARK}Author - Title.")
    return [_book(part) for part in parts]


def _book(part: str) -> Book:
    heading, _, text = part.partition("\n")
    author, _, title = heading.partition(" - ")
    text = text.strip()
    return Book(author, title, text, len(text.split("\n\n")))


def prepare(
    path: Path, run: Path, *, seed: int, tokenizer_from: Path | None, vocab_size: int, n_ctx: int, say: Say
) -> Corpus:
    """The corpus at `path` as tokens, from the run directory's cache where it holds the same.

    `tokenizer_from` is a checkpoint whose tokenizer is kept; without one, a tokenizer of `vocab_size` is trained on the
    books that are trained on. `seed` shuffles the books.

    Raises:
        StartError: the corpus is not as described, or its ids do not fit in 16 bits.
    """
    if vocab_size > 1 << 16:
        raise StartError("--vocab-size is at most 65,536.")
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}.") from error
    source = _digest(tokenizer_from / "tokenizer.json") if tokenizer_from else f"{vocab_size} tokens"
    key = {"sha256": digest, "seed": seed, "filter": SLUR.pattern, "held_out": list(HELD_OUT), "tokenizer": source}
    facts_path = run / "corpus.json"
    facts = json.loads(facts_path.read_text(encoding="utf-8")) if facts_path.is_file() else {}
    if facts.get("key") != key:
        facts_path.unlink(missing_ok=True)  # first, so that an interruption leaves no half of a cache
        facts = _make(read_books(path), run, seed, tokenizer_from, vocab_size, n_ctx, say)
        write_text(facts_path, json.dumps({"key": key, **facts}, indent=1, ensure_ascii=False))
    return Corpus(
        np.load(run / "tokens.npy", mmap_mode="r"),
        BpeTokenizer.from_file(str(run / "tokenizer.json")),
        [_book((run / "held-out" / file).read_text(encoding="utf-8")) for file in facts["held_out_files"]],
        facts,
    )


def split_books(books: Sequence[Book]) -> tuple[list[Book], list[Book]]:
    """To train on; and held out, in the order of `HELD_OUT`.

    Raises:
        StartError: a book that is to be held out is not there, so that nobody measures on what was trained on.
    """
    held_out = [book for title in HELD_OUT for book in books if book.title == title]
    if len(held_out) != len(HELD_OUT):
        raise StartError(f"The corpus must hold, once each, the books that are kept to measure on: {HELD_OUT}.")
    return [book for book in books if book.title not in HELD_OUT], held_out


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Byte-level BPE as GPT-2 has it; `<|endoftext|>` is id 0, then the 256 bytes."""
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
    """`[num_tokens + 1]`: id 0, which begins every book, then the text."""
    return np.array([END_ID, *bpe.encode(text, add_special_tokens=False).ids], dtype=np.uint16)


def write_text(path: Path, text: str) -> None:
    """Written aside, then renamed: a reader sees the old file or the whole new one."""
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def _make(
    books: Sequence[Book], run: Path, seed: int, tokenizer_from: Path | None, vocab_size: int, n_ctx: int, say: Say
) -> dict[str, Any]:
    whole, held_out = split_books(books)
    say("Dropping paragraphs with slurs")
    train = [book.without_slurs() for book in whole]
    if tokenizer_from:
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_from / name, run / name)
    else:
        say(f"Training a tokenizer of {vocab_size} tokens")
        _save_tokenizer(train_tokenizer((book.text for book in train), vocab_size), run, n_ctx)
    bpe = BpeTokenizer.from_file(str(run / "tokenizer.json"))
    random.Random(seed).shuffle(train)
    parts = []
    for number, book in enumerate(train, 1):
        say(f"Tokenising book {number} of {len(train)}: {book.title}")
        parts.append(encode(bpe, book.text))
    tokens = np.concatenate(parts)
    np.save(run / "tokens.npy", tokens)
    (run / "held-out").mkdir(exist_ok=True)
    files = []
    for book in held_out:
        files.append(f"{book.title.lower().replace(' ', '-')}.txt")
        write_text(run / "held-out" / files[-1], f"{book.author} - {book.title}\n\n{book.text}")
    return {
        "books": [
            {
                "author": book.author,
                "title": book.title,
                "tokens": len(part) - 1,
                "paragraphs_dropped": book.num_dropped,
            }
            for book, part in zip(train, parts, strict=True)
        ],
        "held_out_files": files,
        "num_tokens": len(tokens),
        "num_characters": sum(len(book.text) for book in train),
        "num_paragraphs": sum(book.num_paragraphs for book in train),
        "num_paragraphs_dropped": sum(book.num_dropped for book in train),
    }


def _save_tokenizer(bpe: BpeTokenizer, run: Path, n_ctx: int) -> None:
    """The two files that transformers reads."""
    from transformers import PreTrainedTokenizerFast

    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=n_ctx, **special).save_pretrained(run)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}.") from error
