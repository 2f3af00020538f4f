"""Whether a checkpoint keeps its quality in int8, and what it is served in if it does not.

Measured once for each checkpoint, as perplexity on a bundled page of prose (from Jerome K. Jerome's "Three Men in
a Boat", which the embedded checkpoint was not trained on), and remembered. Knows checkpoints and perplexity;
refuses to know slots, servers and where the verdicts are kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.gpt2 import GPT2, GPT2Config, LoadedModel, load_model
from workers.engine.tokens import Tokenizer

PAGE = Path(__file__).parent / "page.txt"
# A perplexity this much higher than fp32's is more than a writer should lose to speed.
MAX_RATIO = 1.01
WINDOW_TOKENS = 512
log = structlog.get_logger()


class Verdict(msgspec.Struct, frozen=True):
    """int8's perplexity on the page divided by fp32's, and what follows from it."""

    dtype: str
    ratio: float


def choose_cpu_dtype(directory: Path, tokenizer: Tokenizer, verdicts: Path) -> Verdict:
    """int8 where the checkpoint keeps its quality in it, else bf16. The first time, this loads it twice.

    Args:
        verdicts: a directory for what was measured; where it cannot be written, nothing is remembered.
    """
    path = verdicts / f"{_fingerprint(directory)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Verdict)
    except (OSError, msgspec.MsgspecError):
        pass  # never measured, or by another version
    verdict = judge(lambda dtype: load_model(directory, dtype=dtype, tokenizer=tokenizer), tokenizer)
    log.info("int8_measured", directory=str(directory), ratio=round(verdict.ratio, 4), dtype=verdict.dtype)
    try:
        verdicts.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(verdict))
    except OSError as error:
        log.warning("verdict_not_kept", path=str(path), reason=error.strerror)
    return verdict


def judge(load: Callable[[str], LoadedModel], tokenizer: Tokenizer) -> Verdict:
    """Compare int8 with fp32 on the bundled page. `load` makes the model in the dtype it is given."""
    ids = tokenizer.encode(PAGE.read_text(encoding="utf-8"))
    ratio = perplexity(load("int8").model, ids) / perplexity(load("fp32").model, ids)
    return Verdict("int8" if ratio <= MAX_RATIO else "bf16", ratio)


@torch.inference_mode()
def perplexity(model: GPT2, token_ids: list[int]) -> float:
    """exp of the mean negative log-likelihood of all but each window's first token; windows do not overlap."""
    window = min(WINDOW_TOKENS, model.config.n_positions)
    total, count = 0.0, 0
    for first in range(0, len(token_ids) - 1, window):
        ids = torch.tensor(token_ids[first : first + window])
        if len(ids) < 2:
            break
        hidden = model.hidden(ids, torch.arange(len(ids)), _causal_attention(model.config))
        for start in range(0, len(ids) - 1, 64):  # logits of a whole window would fill the caches
            targets = ids[start + 1 : start + 65]
            logits = model.logits(hidden[start : start + len(targets)])
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
    return math.exp(total / count)


def _causal_attention(config: GPT2Config) -> Callable[[int, Tensor], Tensor]:
    def attend(_layer: int, qkv: Tensor) -> Tensor:
        query, key, value = qkv.view(len(qkv), 3, config.n_head, config.head_size).permute(1, 2, 0, 3)
        # Queries come scaled.
        mean = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
        return mean.transpose(0, 1).reshape(len(qkv), -1)

    return attend


def _fingerprint(directory: Path) -> str:
    """Changes whenever the checkpoint's files do. Reads none of the weights, which may be gigabytes."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]
