"""GPT-2's byte-level BPE: text to token ids, token ids to bytes and text.

Does not know models, sampling, the protocol, and what is built on it: detokenizer and token healing.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Encoding, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as BpeTokenizer

END_OF_TEXT = "<|endoftext|>"
PART_CHARS = 4096  # of a long text are encoded at once, in about 3 ms
# Byte-level BPE never joins a word with what precedes it, and a space or line feed before a word belongs to the word or
# is a token's end. Other white space is left out: regular expressions differ on what is white space.
_WORD_START = re.compile(r"[ \n](?=\S)")


class Tokenizer:
    """A byte-level BPE tokenizer, padded to its model's vocabulary.

    Ids that the model has and the tokenizer lacks (a synthetic model's) decode to ` ⟨id⟩`; special tokens of an output
    decode to the empty string.

    Attributes:
        max_token_bytes: bytes of text that one token can stand for, at most.
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
        self._special = {id_: token.content for id_, token in bpe.get_added_tokens_decoder().items() if token.special}
        literals = [token.content.encode() for token in bpe.get_added_tokens_decoder().values()]
        self.max_token_bytes = max(map(len, (*self._bytes, *literals)))

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
        """Token ids of `text`, and for each the index of the character at which it begins.

        A long text is encoded in parts, so that other threads get the interpreter lock in between (1 MiB: 0.6 s).
        """
        valid = text.encode("utf-8", "replace").decode()
        ids: list[int] = []
        starts: list[int] = []
        begin = 0
        while begin < len(valid):
            word_start = _WORD_START.search(valid, begin + PART_CHARS)
            end = word_start.start() if word_start else len(valid)
            encoding = self._encode_part(valid[begin:end])
            ids += encoding.ids
            starts += [begin + start for start, _ in encoding.offsets]
            begin = end
        return ids, starts

    def _encode_part(self, part: str) -> Encoding:
        # `encode` holds the interpreter lock, `encode_batch` does not, but takes longer for a short text.
        if len(part) <= 2 * PART_CHARS:
            return self._bpe.encode(part, add_special_tokens=False)
        return self._bpe.encode_batch([part], add_special_tokens=False)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text.

        Raises:
            IndexError: the id is not in the model's vocabulary.
        """
        return self._bytes[token_id]

    def text_of(self, token_id: int) -> str:
        """The text of a single token, by itself: of a special token its name; invalid UTF-8, such as part of a
        character, becomes U+FFFD."""
        return self._special.get(token_id) or self._bytes[token_id].decode("utf-8", "replace")

    def prompt_texts(self, ids: Iterable[int]) -> list[str]:
        """What each token adds to a prompt's text, whose special tokens are written out; nothing inside a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [self._special.get(id_) or decoder.decode(self._bytes[id_]) for id_ in ids]

    def last_word_start(self, text: str) -> int:
        """The character at which the last word of `text` starts: what BPE never joins with what precedes it."""
        pre_tokenizer = self._bpe.pre_tokenizer
        words = pre_tokenizer.pre_tokenize_str(text) if pre_tokenizer is not None else []
        return int(words[-1][1][0]) if words else 0


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
