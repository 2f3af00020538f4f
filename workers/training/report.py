"""Evaluates a checkpoint: perplexity and bits per byte on held-out books, and samples.

Works on any GPT-2 checkpoint in a directory, so that old and new checkpoints are measured alike. Does not know how they
were trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as BpeTokenizer
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from shared.errors import StartError
from shared.weights import weights_digest
from workers.training.corpus import END_ID, Book, Say, encode

WINDOW_TOKENS = 512
ROWS = 4  # windows per batch: [4, 512, 8192] logits in fp32 are 67 MB
SAMPLE_TOKENS = 40
# Everyday sentences, as users of autocompletion write them, not passages of books.
OPENINGS = Path(__file__).parent / "openings.txt"


class Unreduced(nn.Module):
    """Cross-entropy per token: ids, targets and positions, `[rows, length]` each → nats, `[rows, length]`.

    Calls the blocks directly: for positions that do not start at 0, GPT2Model assumes packed sequences and uses an
    attention mask instead of the causal kernel.
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
    """Number of text bytes of each id, `[vocab]`. Byte-level BPE writes each byte as one character."""
    lengths = torch.tensor([len(bpe.id_to_token(id_) or "") for id_ in range(bpe.get_vocab_size())])
    lengths[END_ID] = 0
    return lengths


@torch.inference_mode()
def held_out(
    model: Any, bpe: BpeTokenizer, book: Book, device: torch.device, max_windows: int | None = None
) -> dict[str, Any]:
    """Perplexity and bits per byte on a book. Each token is predicted once, from the tokens before it in its window.

    Args:
        max_windows: measure only the first windows of the book.
    """
    ids = torch.from_numpy(encode(bpe, book.text).astype("int64"))
    window = min(WINDOW_TOKENS, model.config.n_positions)
    if max_windows is not None:
        ids = ids[: max_windows * window + 1]
    loss_of = Unreduced(model)
    total = torch.zeros((), dtype=torch.float64, device=device)
    num_whole = (len(ids) - 1) // window * window
    given_ids, target_ids = ids[:-1], ids[1:]
    slices = [slice(first, min(first + ROWS * window, num_whole)) for first in range(0, num_whole, ROWS * window)]
    if num_whole < len(target_ids):
        slices.append(slice(num_whole, None))  # a last, shorter window
    for part in slices:
        length = min(window, len(target_ids[part]))
        given, targets = given_ids[part].view(-1, length), target_ids[part].view(-1, length)
        positions = torch.arange(given.shape[1], device=device).expand_as(given)
        total += loss_of(given.to(device), targets.to(device), positions).double().sum()
    num_bytes = int(byte_lengths(bpe)[ids[1:]].sum())
    return {
        "title": book.title,
        "tokens": len(ids) - 1,
        "bytes": num_bytes,
        "bits_per_byte": round(float(total) / math.log(2) / num_bytes, 4),
        "perplexity": round(math.exp(float(total) / (len(ids) - 1)), 2),
    }


def report(directory: Path, books: Sequence[Book], device: torch.device, seed: int, say: Say) -> dict[str, Any]:
    """Evaluate the checkpoint in `directory` in fp32. Deterministic on one machine.

    Args:
        say: receives what is being done.

    Raises:
        StartError: the checkpoint cannot be read.
    """
    try:
        model = GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32).to(device).eval()
        bpe = BpeTokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise StartError(f"{directory} holds no readable checkpoint: {error}.") from error
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
        # A seed per opening: one seed for all makes the samples repeat phrases.
        "samples": [
            _sample(model, bpe, opening, device, seed + index)
            for index, opening in enumerate(OPENINGS.read_text(encoding="utf-8").splitlines())
        ],
    }


def _sample(model: Any, bpe: BpeTokenizer, opening: str, device: torch.device, seed: int) -> dict[str, str]:
    ids = torch.tensor([bpe.encode(opening, add_special_tokens=False).ids], device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=0.8,
            top_k=50,
            max_new_tokens=SAMPLE_TOKENS,
            pad_token_id=END_ID,
        )
    return {"opening": opening, "text": bpe.decode(generated[0, ids.shape[1] :].tolist())}
