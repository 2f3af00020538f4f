"""What several test modules of the worker share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as BpeTokenizer

from tests.e2e.harness import until
from workers.checkpoints.gguf_tokenizer import PRE_TOKENIZERS
from workers.text.detokenizer import Detokenizer
from workers.text.token_healing import TokenHealing
from workers.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "workers/checkpoints/embedded"
PATIENCE_S = 240.0


def run_python(
    program: str, timeout_s: float = 60, *, pass_fds: Sequence[int] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with `environ` added to the environment."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        pass_fds=pass_fds,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does; fails rather than hangs."""
    until(condition, PATIENCE_S, "what another thread does")


healing_of = lru_cache(TokenHealing)


def with_pre_tokenizer(name: str) -> BpeTokenizer:
    """The embedded vocabulary under the pre-tokenizer of another model."""
    values = json.loads((EMBEDDED / "tokenizer.json").read_text())
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]}
    values["normalizer"] = {"type": "NFC"} if name == "qwen2" else None
    return BpeTokenizer.from_str(json.dumps(values))


def write_slow_tokenizer(directory: Path) -> None:
    """The embedded tokenizer in the files of older GPT-2 checkpoints, which have no tokenizer.json."""
    model = json.loads((EMBEDDED / "tokenizer.json").read_text())["model"]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Text of `ids`. Invalid UTF-8 becomes U+FFFD; an incomplete last character is dropped."""
    detokenizer = Detokenizer(tokenizer)
    return "".join([*map(detokenizer.feed, ids), detokenizer.finish()])
