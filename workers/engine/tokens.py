"""Text to token ids and back: byte-level BPE, and decoding that never tears a character.

Knows byte-level BPE as GPT-2 has it. Refuses to know models, sampling and the wire.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """A byte-level BPE tokenizer, padded to its model's vocabulary.

    Ids past the tokenizer's own end (a synthetic model's) decode to ` ⟨id⟩`, special tokens to
    nothing.
    """

    def __init__(self, bpe: BpeTokenizer, vocab_size: int) -> None:
        """
        Raises:
            ValueError: if the tokenizer has ids that the model does not, or is not byte-level.
        """
        own_size = bpe.get_vocab_size()
        if own_size > vocab_size:
            raise ValueError(f"the tokenizer has {own_size} tokens, the model only {vocab_size}")
        self._bpe = bpe
        self.vocab_size = vocab_size
        self.eos_id: int | None = bpe.token_to_id(END_OF_TEXT)
        self._bytes = _byte_table(bpe, vocab_size)

    @classmethod
    def from_directory(cls, path: Path, vocab_size: int) -> Tokenizer:
        """The tokenizer of a checkpoint: `tokenizer.json`, else `vocab.json` and `merges.txt`.

        Raises:
            FileNotFoundError: if neither is there.
            ValueError: as the constructor.
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
        """Token ids of `text`; a half of a surrogate pair counts as a question mark."""
        sound = text.encode("utf-8", "replace").decode()
        ids: list[int] = self._bpe.encode(sound, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`. Bytes that are no UTF-8 become U+FFFD; an unfinished character goes."""
        detokenizer = Detokenizer(self)
        return "".join([*map(detokenizer.feed, ids), detokenizer.finish()])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text.

        Raises:
            IndexError: if the id is not in the model's vocabulary.
        """
        return self._bytes[token_id]


class StopMatcher:
    """Finds the first stop string in a stream of bytes, and says which bytes it cannot concern.

    Bytes that may be the beginning of a stop string are held back until the next ones decide.
    """

    __slots__ = ("_held", "_stops", "has_stopped")

    def __init__(self, stops: Iterable[str], *, single_line: bool = False) -> None:
        """
        Raises:
            ValueError: if a stop string is empty.
        """
        self._stops = [stop.encode("utf-8", "replace") for stop in stops]
        if single_line:
            self._stops.append(b"\n")
        if not all(self._stops):
            raise ValueError("a stop string must not be empty")
        self._held = b""
        self.has_stopped = False

    def feed(self, data: bytes) -> bytes:
        """The bytes that are free to go; after a stop string, those before it and then none."""
        if self.has_stopped:
            return b""
        if not self._stops:
            return data
        data = self._held + data
        starts = [start for stop in self._stops if (start := data.find(stop)) >= 0]
        if starts:
            self.has_stopped = True
            self._held = b""
            return data[: min(starts)]
        num_held = max(_overlap(data, stop) for stop in self._stops)
        self._held = data[len(data) - num_held :]
        return data[: len(data) - num_held]

    def finish(self) -> bytes:
        """The bytes held back, when nothing more comes."""
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, stop: bytes) -> int:
    """Length of the longest end of `data` that is a proper beginning of `stop`."""
    for length in range(min(len(data), len(stop) - 1), 0, -1):
        if data.endswith(stop[:length]):
            return length
    return 0


class Detokenizer:
    """Tokens in, text out, one sequence's: whole characters only, nothing that a stop takes back.

    `"".join([*map(feed, ids), finish()])` is the text up to the first stop string, the same
    however the ids are spread over calls.
    """

    __slots__ = ("_decoder", "_matcher", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, single_line: bool = False) -> None:
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(stop, single_line=single_line)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that is certain now that `token_id` has come; it may be empty."""
        return self._decoder.decode(self._matcher.feed(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """The rest, at the end; an unfinished last character is dropped."""
        return self._decoder.decode(self._matcher.finish())


def _byte_table(bpe: BpeTokenizer, vocab_size: int) -> list[bytes]:
    """Id → bytes, `vocab_size` of them."""
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
        else:  # an added token that is not special stands for its own text
            table.append(token.encode())
    return table


def _byte_characters() -> Iterator[tuple[int, str]]:
    """(byte, character) pairs of GPT-2's byte-level alphabet.

    Source: `bytes_to_unicode` of openai/gpt-2, `src/encoder.py`: printable Latin-1 bytes stand for
    themselves, the rest for the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    num_others = 0
    for byte in range(256):
        if byte in printable:
            yield byte, chr(byte)
        else:
            yield byte, chr(0x100 + num_others)
            num_others += 1
