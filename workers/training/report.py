"""What a checkpoint is worth: perplexity and bits per byte on books that it never saw, and samples.

Knows any GPT-2 checkpoint in a directory, so that an old one and a new one are measured alike. Refuses to know how they
were trained.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer as BpeTokenizer
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from shared.errors import StartError
from workers.training.corpus import END_ID, Book, Say, encode

WINDOW_TOKENS = 512
ROWS = 4  # windows at once: [4, 512, 8192] logits in fp32 are 67 MB
SAMPLE_TOKENS = 40
# Everyday ones: an autocompletion server's users, not its books.
OPENINGS = Path(__file__).parent / "openings.txt"


class Unreduced(nn.Module):
    """What every target costs: ids, targets and positions, each `[rows, length]` → nats, `[rows, length]`.

    Goes through the blocks itself: handed positions that do not begin at 0, GPT2Model would look for several texts in
    a row, and give up the causal kernel for a mask.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        body = self.model.transformer
        x = body.drop(body.wte(ids) + body.wpe(positions))
        for block in body.h:
            x = block(x)
        logits = self.model.lm_head(body.ln_f(x))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return loss.view_as(targets)


def byte_lengths(bpe: BpeTokenizer) -> Tensor:
    """`[vocab]`: how many bytes of text each id stands for. Byte-level BPE writes a byte as one character."""
    lengths = torch.tensor([len(bpe.id_to_token(id_) or "") for id_ in range(bpe.get_vocab_size())])
    lengths[END_ID] = 0
    return lengths


@torch.inference_mode()
def held_out(
    model: Any, bpe: BpeTokenizer, book: Book, device: torch.device, max_windows: int | None = None
) -> dict[str, Any]:
    """Every token of the book (or of its first windows) is predicted once, from those before it in its window."""
    ids = torch.from_numpy(encode(bpe, book.text).astype("int64"))
    window = min(WINDOW_TOKENS, model.config.n_positions)
    if max_windows is not None:
        ids = ids[: max_windows * window + 1]
    nats = Unreduced(model)
    total = torch.zeros((), dtype=torch.float64, device=device)
    num_whole = (len(ids) - 1) // window * window
    given_ids, target_ids = ids[:-1], ids[1:]
    pieces = [slice(first, min(first + ROWS * window, num_whole)) for first in range(0, num_whole, ROWS * window)]
    if num_whole < len(target_ids):
        pieces.append(slice(num_whole, None))  # shorter than a window
    for piece in pieces:
        length = min(window, len(target_ids[piece]))
        given, targets = given_ids[piece].view(-1, length), target_ids[piece].view(-1, length)
        positions = torch.arange(given.shape[1], device=device).expand_as(given)
        total += nats(given.to(device), targets.to(device), positions).double().sum()
    num_bytes = int(byte_lengths(bpe)[ids[1:]].sum())
    return {
        "title": book.title,
        "tokens": len(ids) - 1,
        "bytes": num_bytes,
        "bits_per_byte": round(float(total) / math.log(2) / num_bytes, 4),
        "perplexity": round(math.exp(float(total) / (len(ids) - 1)), 2),
    }


def report(directory: Path, books: Sequence[Book], device: torch.device, seed: int, say: Say) -> dict[str, Any]:
    """All that is measured of the checkpoint in `directory`, in fp32. The same each time on the same machine.

    Raises:
        StartError: there is no such checkpoint.
    """
    try:
        model = GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32).to(device).eval()
        bpe = BpeTokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises no other class
        raise StartError(f"{directory} holds no checkpoint that can be read: {error}.") from error
    rows = []
    for book in books:
        say(f"Measuring on {book.title}")
        rows.append(held_out(model, bpe, book, device))
    say("Writing samples")
    return {
        "sha256": weights_digest(directory),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "window_tokens": min(WINDOW_TOKENS, model.config.n_positions),
        "books": rows,
        "mean": {
            name: round(sum(row[name] for row in rows) / len(rows), digits)
            for name, digits in (("bits_per_byte", 4), ("perplexity", 2))
        },
        # A seed for each: with one for all, the same phrases come again and again.
        "samples": [
            _sample(model, bpe, opening, device, seed + place)
            for place, opening in enumerate(OPENINGS.read_text(encoding="utf-8").splitlines())
        ],
    }


def weights_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def tables(result: dict[str, Any]) -> list[Table]:
    """For a person: the figures, then the samples."""
    figures = Table("book", "tokens", "bits per byte", "perplexity", title="Held out")
    for row in result["books"]:
        figures.add_row(row["title"], f"{row['tokens']:,}", f"{row['bits_per_byte']:.4f}", f"{row['perplexity']:.1f}")
    mean = result["mean"]
    figures.add_section()
    figures.add_row("mean", "", f"{mean['bits_per_byte']:.4f}", f"{mean['perplexity']:.1f}")
    samples = Table("opening", "what the model wrote", title="Samples", show_lines=True)
    for sample in result["samples"]:
        samples.add_row(sample["opening"], Text(" ".join(sample["text"].split())))
    return [figures, samples]


def _sample(model: Any, bpe: BpeTokenizer, opening: str, device: torch.device, seed: int) -> dict[str, str]:
    ids = torch.tensor([bpe.encode(opening, add_special_tokens=False).ids], device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=0.8,
            top_k=50,
            max_new_tokens=SAMPLE_TOKENS,
            pad_token_id=END_ID,
        )
    return {"opening": opening, "text": bpe.decode(written[0, ids.shape[1] :].tolist())}
