"""GPT-2's byte-level BPE: text to token ids, token ids to bytes and text.

Does not know models, sampling or the protocol.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as BpeTokenizer

from workers.text.detokenizer import Detokenizer
from workers.text.token_healing import TokenConstraint

END_OF_TEXT = "<|endoftext|>"
# A word longer than this (a text without spaces) is taken up again at its last tokens.
MAX_TYPED_BYTES = 32
# How far back the beginning of the last word is looked for.
_LAST_CHARS = 64


class Tokenizer:
    """A byte-level BPE tokenizer, padded to its model's vocabulary.

    Ids that the model has and the tokenizer lacks (a synthetic model's) decode to ` ⟨id⟩`; special tokens decode to the
    empty string.
    """

    def __init__(self, bpe: BpeTokenizer, vocab_size: int) -> None:
        """
        Args:
            vocab_size: the model's.

        Raises:
            ValueError: the tokenizer has more tokens than the model.
        """
        own_size = bpe.get_vocab_size()
        if own_size > vocab_size:
            raise ValueError(f"the tokenizer has {own_size} tokens, the model only {vocab_size}")
        self._bpe = bpe
        bpe.post_processor = processors.ByteLevel(trim_offsets=False)  # a token's offset includes its leading space
        self.vocab_size = vocab_size
        self.eos_id: int | None = bpe.token_to_id(END_OF_TEXT)
        self._bytes = _byte_table(bpe, vocab_size)
        by_bytes = sorted((data, id_) for id_, data in enumerate(self._bytes) if data)
        self._sorted_bytes = [data for data, _ in by_bytes]
        self._sorted_ids = [id_ for _, id_ in by_bytes]
        self._id_of = dict(reversed(by_bytes))  # the smallest id of those with equal bytes
        self._has_all_bytes = all(bytes([byte]) in self._id_of for byte in range(256))
        self.constraint = lru_cache(maxsize=1024)(self._constraint)

    @classmethod
    def from_directory(cls, path: Path, vocab_size: int) -> Tokenizer:
        """The tokenizer of a checkpoint: `tokenizer.json`, else `vocab.json` and `merges.txt`.

        Raises:
            FileNotFoundError: neither exists.
            ValueError: as in the constructor.
        """
        if (path / "tokenizer.json").is_file():
            return cls(BpeTokenizer.from_file(str(path / "tokenizer.json")), vocab_size)
        if not (path / "vocab.json").is_file() or not (path / "merges.txt").is_file():
            raise FileNotFoundError(f"{path} has neither tokenizer.json nor vocab.json, merges.txt")
        bpe = BpeTokenizer(models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt")))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        bpe.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        return cls(bpe, vocab_size)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; an unpaired surrogate is encoded as a question mark."""
        return self.encode_with_starts(text)[0]

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of `text`, and for each the index of the character at which it begins."""
        valid = text.encode("utf-8", "replace").decode()
        encoding = self._bpe.encode(valid, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`. Invalid UTF-8 becomes U+FFFD; an incomplete last character is dropped."""
        detokenizer = Detokenizer(self)
        return "".join([*map(detokenizer.feed, ids), detokenizer.finish()])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text.

        Raises:
            IndexError: the id is not in the model's vocabulary.
        """
        return self._bytes[token_id]

    def text_of(self, token_id: int) -> str:
        """The text of a single token; invalid UTF-8, such as part of a character, becomes U+FFFD."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def split_typed(self, text: str) -> tuple[str, bytes]:
        """`text` before its last word, and the bytes of that word, the space before it included.

        A context that ends inside a word, or in a space, ends in tokens that the text it was trained on would not
        have there: the model goes on badly. So it is asked to go on from before the last word (what the tokenizer
        never joins with anything before it: letters, digits, marks or white space), and held to what was typed of it
        (`choices`); "token healing". Of a text that is one word, only what follows its first token is taken up
        again, of a very long word only the last tokens, and with a vocabulary that cannot say any text, nothing.
        """
        if not text or not self._has_all_bytes:
            return text, b""
        last = text[-_LAST_CHARS:].encode("utf-8", "replace").decode()
        start = self._last_word(last)
        typed = last[start:]
        if start == 0 or len(typed.encode()) > MAX_TYPED_BYTES:
            typed = self._last_tokens(typed)
        return text[: len(text) - len(typed)], typed.encode()

    def _last_word(self, text: str) -> int:
        """Where the last word of `text` starts, in characters."""
        pre_tokenizer = self._bpe.pre_tokenizer
        words = pre_tokenizer.pre_tokenize_str(text) if pre_tokenizer is not None else []
        return int(words[-1][1][0]) if words else 0

    def _last_tokens(self, word: str) -> str:
        """The longest end of `word` that is whole tokens and whole characters, not too long, and not all of it."""
        encoding = self._bpe.encode(word, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets if start > 0]
        few = [start for start in starts if len(word[start:].encode()) <= MAX_TYPED_BYTES]
        return word[min(few, default=len(word)) :]

    def _constraint(self, typed: bytes) -> TokenConstraint:
        """The next tokens of a text that must begin with `typed` (not empty).

        All tokens that begin with all of it; of those that are a part of it, the ones that a tokenizer could take:
        the first of `typed` as it stands, and as it would be in front of a letter. Others would lead to a text in
        pieces that the model has never seen, however likely they are for another word (" f" of " fishwife"); unless
        the model prefers one to everything else. Where all of it is a token that no longer one begins with, it is a
        whole word, mostly, and only that can come (not " the" of " they", which must then go on with "y").
        """
        first = bisect_left(self._sorted_bytes, typed)
        from_here = range(first, len(self._sorted_bytes))
        beginning = takewhile(lambda at: self._sorted_bytes[at].startswith(typed), from_here)
        whole = {self._sorted_ids[at] for at in beginning}
        longer = frozenset(id_ for id_ in whole if len(self._bytes[id_]) > len(typed))
        parts = {self._id_of[typed[:n]] for n in range(1, len(typed)) if typed[:n] in self._id_of}
        if whole and not longer:
            parts = set()
        firsts = (self._first_token(typed), self._first_token(typed + b"a"))
        usual = {id_ for id_ in firsts if id_ in parts or id_ in whole}
        allowed = whole | (usual or parts)
        return TokenConstraint(tuple(sorted(allowed)), tuple(sorted(parts - allowed)), longer)

    def _first_token(self, data: bytes) -> int:
        """-1 where the bytes are no text."""
        ids = self.encode(data.decode("utf-8", "ignore"))
        return ids[0] if ids else -1


def _byte_table(bpe: BpeTokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of each token, indexed by id, `[vocab_size]`."""
    special = {id_ for id_, token in bpe.get_added_tokens_decoder().items() if token.special}
    byte_of = {char: byte for byte, char in _byte_characters()}
    table = []
    for id_ in range(vocab_size):
        token = bpe.id_to_token(id_)
        if token is None:
            table.append(f" ⟨{id_}⟩".encode())
        elif id_ in special:
            table.append(b"")
        elif all(char in byte_of for char in token):
            table.append(bytes(byte_of[char] for char in token))
        else:  # an added token that is not special is literal text
            table.append(token.encode())
    return table


def _byte_characters() -> Iterator[tuple[int, str]]:
    """(byte, character) pairs of GPT-2's byte-level alphabet.

    Source: `bytes_to_unicode` of openai/gpt-2, `src/encoder.py`: printable Latin-1 bytes map to themselves, the others
    to the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    num_others = 0
    for byte in range(256):
        if byte in printable:
            yield byte, chr(byte)
        else:
            yield byte, chr(0x100 + num_others)
            num_others += 1
