"""Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it: text to token ids, token ids to bytes and text.

Does not know models, sampling, the protocol, and what is built on it: detokenizer and token healing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken, Encoding, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as BpeTokenizer

from shared.end_tokens import read_end_ids, read_start_id
from shared.plain_files import read_plain

END_OF_TEXT = "<|endoftext|>"
PART_CHARS = 4096  # of a long text are encoded at once, in about 3 ms
# Where every pre-tokenizer splits: between a letter or digit and white space, and before a single space. Not before all
# white space: Llama's and Qwen's join line feeds with the punctuation before them, and SmolLM's, which splits off
# digits first, joins the spaces before a number.
_WORD_START = re.compile(r"(?<=[^\W_])\s|(?<=\S) (?=\S)")

# Words whose tokens each thread that encodes remembers. `tokenizers` would keep 10,000, and 5,000 take 1.8 MB in each
# of a worker's threads. Prose of 1,200 characters takes 0.22 ms with both numbers, 0.29 ms with none (Zen 4).
NUM_CACHED_WORDS = 1000


AddedIds: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # before and after a text


class Tokenizer:
    """A byte-level BPE tokenizer, padded to its model's vocabulary. It may have tokens that the model lacks, too.

    Ids that the model has and the tokenizer lacks (a synthetic model's) decode to ` ⟨id⟩`; special tokens of an output
    decode to the empty string.

    Attributes:
        unused_ids: those ids that the model has and the tokenizer lacks, ascending.
        before_ids, after_ids: tokens that transformers' tokenizer adds to a text (by the post-processor). `encode`
            does not add them.
        max_token_bytes: bytes of text that one token can stand for, at most.
        eos_id: the token between two texts: END_OF_TEXT, or the checkpoint's end where the tokenizer has no such token.
        end_ids: all tokens after which a text has ended; those of the checkpoint first.
        start_id: the token that stands for an empty text; None if the checkpoint names neither a start nor an end.
    """

    def __init__(
        self,
        bpe: BpeTokenizer,
        vocab_size: int,
        end_ids: Sequence[int] = (),
        start_id: int | None = None,
        added_ids: AddedIds | None = None,
    ) -> None:
        """
        Args:
            vocab_size: the model's.
            end_ids: tokens that end a text, as the checkpoint names them.
            start_id: the token that begins a text, as the checkpoint names it.
            added_ids: `before_ids` and `after_ids`; by default those of the post-processor.
        """
        self._bpe = bpe
        if isinstance(bpe.model, models.BPE):
            bpe.model._resize_cache(NUM_CACHED_WORDS)
        bpe.no_truncation()  # a tokenizer.json keeps what a script had set for training
        bpe.no_padding()
        self.before_ids, self.after_ids = _post_processed(bpe) if added_ids is None else added_ids
        bpe.post_processor = processors.ByteLevel(trim_offsets=False)  # a token's offset includes its leading space
        self.vocab_size = vocab_size
        known = [id_ for id_ in end_ids if id_ < vocab_size]
        self.eos_id: int | None = next(iter(known), None)
        if (end_of_text := bpe.token_to_id(END_OF_TEXT)) is not None and end_of_text < vocab_size:
            self.eos_id = end_of_text
            known.append(end_of_text)
        self.end_ids = tuple(dict.fromkeys(known))
        self.start_id = self.eos_id if start_id is None or start_id >= vocab_size else start_id
        self._plain = _without_special_tokens(bpe)
        self._bytes = _byte_table(bpe, vocab_size)
        self.unused_ids = tuple(id_ for id_ in range(vocab_size) if bpe.id_to_token(id_) is None)
        self._special = {id_: token.content for id_, token in bpe.get_added_tokens_decoder().items() if token.special}
        self._names = _names_of(self._special.get(id_, "").encode() or data for id_, data in enumerate(self._bytes))
        self.max_token_bytes = max(map(len, (*self._bytes, *map(str.encode, self._special.values()))))

    @classmethod
    def from_directory(cls, path: Path, vocab_size: int) -> Tokenizer:
        """The tokenizer of a checkpoint; raises as `load_bpe`."""
        bpe = load_bpe(path)
        return cls(bpe, vocab_size, read_end_ids(path), read_start_id(path), _configured(bpe, path))

    def encode(self, text: str, *, special_as_text: bool = False) -> list[int]:
        """Token ids of `text`; an unpaired surrogate is encoded as a question mark.

        Args:
            special_as_text: what spells a special token is text, as a writer typed it. False: it is that token.
        """
        return self.encode_with_starts(text, special_as_text=special_as_text)[0]

    def encode_with_starts(
        self, text: str, *, special_as_text: bool = False, after_part: Callable[[], None] | None = None
    ) -> tuple[list[int], list[int]]:
        """As `encode`, and for each token the index of the character at which it begins.

        A long text is encoded in parts, so that other threads get the interpreter lock in between (1 MiB: 0.6 s).

        Args:
            after_part: called after each part; it may raise.
        """
        bpe = self._plain if special_as_text else self._bpe
        valid = text.encode("utf-8", "replace").decode()
        ids: list[int] = []
        starts: list[int] = []
        begin = 0
        while begin < len(valid):
            word_start = _WORD_START.search(valid, begin + PART_CHARS)
            end = word_start.start() if word_start else len(valid)
            encoding = _encode_part(bpe, valid[begin:end])
            ids += encoding.ids
            starts += [begin + start for start, _ in encoding.offsets]
            begin = end
            if after_part is not None:
                after_part()
        return ids, starts

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text.

        Raises:
            IndexError: neither the model nor the tokenizer has the id.
        """
        return self._bytes[token_id]

    def text_of(self, token_id: int) -> str:
        """The text of a single token, by itself: of a special token its name; invalid UTF-8, such as part of a
        character, becomes U+FFFD."""
        return self._special.get(token_id) or self._bytes[token_id].decode("utf-8", "replace")

    def names_of(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Names of those tokens whose text (`text_of`) is not theirs alone, by id.

        No two tokens of the vocabulary have the same name; the other tokens' names are their texts. Bytes that are not
        text are named as by OpenAI's API (`bytes:\\xc3`), what else shares its text as by vLLM (`token_id:7`).
        """
        return {id_: self._names[id_] for id_ in token_ids if id_ in self._names}

    def prompt_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a prompt's text, in which special tokens are written out."""
        return self._special.get(token_id, "").encode() or self._bytes[token_id]

    def special_end(self, text: str) -> int:
        """The index after the last special token that `text` spells; 0 if there is none."""
        ends = ((text.rfind(name), len(name)) for name in self._special.values())
        return max((at + length for at, length in ends if at >= 0), default=0)

    def last_word_start(self, text: str) -> int:
        """The character at which the last word of `text` starts: what BPE never joins with what precedes it."""
        pre_tokenizer = self._bpe.pre_tokenizer
        words = pre_tokenizer.pre_tokenize_str(text) if pre_tokenizer is not None else []
        return int(words[-1][1][0]) if words else 0


def load_bpe(path: Path) -> BpeTokenizer:
    """The tokenizer in a checkpoint's directory: `tokenizer.json`, else `vocab.json` and `merges.txt`.

    Raises:
        FileNotFoundError: neither exists.
        Exception: a file is damaged; the tokenizers library raises no other class.
    """
    if (path / "tokenizer.json").is_file():
        return BpeTokenizer.from_file(str(path / "tokenizer.json"))
    if not (path / "vocab.json").is_file() or not (path / "merges.txt").is_file():
        raise FileNotFoundError(f"{path} has neither tokenizer.json nor vocab.json, merges.txt")
    bpe = BpeTokenizer(models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt")))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    _add_tokens(bpe, path)
    return bpe


def _post_processed(bpe: BpeTokenizer) -> AddedIds:
    """The tokens that the post-processor adds before and after a text."""
    encoding = bpe.encode("a")
    added = [sequence is None for sequence in encoding.sequence_ids]
    num_before = next((index for index, is_added in enumerate(added) if not is_added), len(added))
    num_text = next((index for index, is_added in enumerate(added[num_before:]) if is_added), len(added))
    return tuple(encoding.ids[:num_before]), tuple(encoding.ids[num_before + num_text :])


def _configured(bpe: BpeTokenizer, path: Path) -> AddedIds | None:
    """The tokens that tokenizer_config.json adds before and after a text; None: it leaves that to the post-processor.

    As `TokenizersBackend` of transformers 5, where `add_bos_token` or `add_eos_token` replaces the post-processor.
    """
    config = _read_json(path / "special_tokens_map.json") | _read_json(path / "tokenizer_config.json")
    if not config.keys() & {"add_bos_token", "add_eos_token"}:
        return None
    added = []
    for role in ("bos", "eos"):
        token = config.get(f"{role}_token") if config.get(f"add_{role}_token") else None
        id_ = bpe.token_to_id(content) if (content := _content(token)) is not None else None
        added.append(() if id_ is None else (id_,))
    return added[0], added[1]


def _content(token: object) -> str | None:
    """The text of a token in tokenizer_config.json or special_tokens_map.json: a string, or an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _add_tokens(bpe: BpeTokenizer, path: Path) -> None:
    """Add the special tokens of a slow tokenizer, and those that were added to its vocabulary.

    Raises:
        ValueError: they have other ids here than in `added_tokens.json`.
    """
    added: dict[str, int] = _read_json(path / "added_tokens.json")
    named = _read_json(path / "special_tokens_map.json").values()
    special = {content for token in named if (content := _content(token)) is not None}
    for token, id_ in sorted(added.items(), key=lambda item: item[1]):
        bpe.add_tokens([AddedToken(token, special=token in special | {END_OF_TEXT}, normalized=False)])
        if bpe.token_to_id(token) != id_:
            raise ValueError(f"added_tokens.json gives {token!r} the id {id_}, which does not follow the vocabulary")
    known = [token for token in dict.fromkeys((END_OF_TEXT, *special)) if bpe.token_to_id(token) is not None]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])


def _read_json(path: Path) -> dict[str, Any]:
    values = json.loads(read_plain(path)) if path.exists() else {}
    return values if isinstance(values, dict) else {}


def _without_special_tokens(bpe: BpeTokenizer) -> BpeTokenizer:
    """The same tokenizer, for which what spells a special token is text. Both share one vocabulary."""
    plain = BpeTokenizer(bpe.model)
    plain.normalizer, plain.pre_tokenizer, plain.post_processor = bpe.normalizer, bpe.pre_tokenizer, bpe.post_processor
    for _, token in sorted(bpe.get_added_tokens_decoder().items()):  # in the order that gives them the same ids
        plain.add_tokens([token])
    plain.encode_special_tokens = True
    return plain


def _encode_part(bpe: BpeTokenizer, part: str) -> Encoding:
    # `encode` holds the interpreter lock, which for a short text takes less time than to get it back.
    if len(part) <= PART_CHARS // 2:
        return bpe.encode(part, add_special_tokens=False)
    return bpe.encode_batch([part], add_special_tokens=False)[0]


def _names_of(texts: Iterable[bytes]) -> dict[int, str]:
    """The names of `Tokenizer.names_of`, of a whole vocabulary: `texts` are those of its tokens, in their order."""
    names = {}
    seen = set()
    for id_, data in enumerate(texts):
        text = data.decode("utf-8", "replace")
        if data in seen or text.startswith(("bytes:\\x", "token_id:")):
            names[id_] = f"token_id:{id_}"
        elif text.encode() != data:
            names[id_] = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        seen.add(data)
    return names


def _byte_table(bpe: BpeTokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of each token, indexed by id, `[vocab_size]` or more where the tokenizer has more tokens."""
    added = bpe.get_added_tokens_decoder()
    byte_of = _byte_characters()
    table = []
    for id_ in range(max(vocab_size, 1 + max(bpe.get_vocab().values(), default=0))):
        token = bpe.id_to_token(id_)
        if token is None:
            table.append(f" ⟨{id_}⟩".encode())
        elif id_ in added and added[id_].special:
            table.append(b"")
        elif id_ in added and token not in byte_of:  # literal text, whatever its characters stand for elsewhere
            table.append(token.encode())
        elif all(char in byte_of for char in token):
            table.append(bytes(byte_of[char] for char in token))
        else:
            table.append(token.encode())
    return table


def _byte_characters() -> dict[str, int]:
    """The byte of each character of GPT-2's byte-level alphabet.

    Source: `bytes_to_unicode` of openai/gpt-2, `src/encoder.py`: printable Latin-1 bytes map to themselves, the others
    to the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
