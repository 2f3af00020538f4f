"""Whether a checkpoint keeps its quality in int8, and what it is served in if it does not.

Measured once for each checkpoint, as perplexity on a bundled page of prose (from Jerome K. Jerome's "Three Men in
a Boat", which the embedded checkpoint was not trained on), and remembered. Knows checkpoints and perplexity;
refuses to know entries, servers and where the verdicts are kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from workers.engine.core import EngineCore
from workers.engine.cpu.runner import CpuRunner
from workers.engine.interrupt import Interrupt
from workers.engine.model.loader import LoadedModel, load_model
from workers.engine.request import EngineRequest, SamplingParams
from workers.engine.result_stream import ResultStream
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence
from workers.text.tokenizer import Tokenizer

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
        log.warning("int8_verdict_discarded", path=str(path), reason=error.strerror)
    return verdict


def judge(load: Callable[[str], LoadedModel], tokenizer: Tokenizer) -> Verdict:
    """Compare int8 with fp32 on the bundled page. `load` makes the model in the dtype it is given."""
    ids = tokenizer.encode(PAGE.read_text(encoding="utf-8"))
    ratio = perplexity(load("int8"), ids) / perplexity(load("fp32"), ids)
    return Verdict("int8" if ratio <= MAX_RATIO else "bf16", ratio)


def perplexity(loaded: LoadedModel, token_ids: list[int]) -> float:
    """exp of the mean negative log-likelihood of all but each window's first token; windows do not overlap.

    Computed as everything is that is served: by the engine's runner, from its cache.
    """
    window = min(WINDOW_TOKENS, loaded.config.n_positions - 1)
    runner = CpuRunner(loaded, 1, Interrupt())
    logprobs: list[float] = []
    for first in range(0, len(token_ids) - 1, window):
        ids = tuple(token_ids[first : first + window])
        if len(ids) > 1:
            logprobs += (logprob for logprob in _prompt_logprobs(runner, ids) if logprob is not None)
    return math.exp(-sum(logprobs) / len(logprobs))


def _prompt_logprobs(runner: CpuRunner, token_ids: tuple[int, ...]) -> tuple[float | None, ...]:
    """The log-probability of each token given those before it; None for the first."""
    core = EngineCore(Scheduler(runner.num_entries, 1), runner, eos_id=None)
    request = EngineRequest(token_ids, SamplingParams(max_new_tokens=1), seed=0, echo_logprobs=True)
    stream = ResultStream()
    core.add(Sequence(request, stream, start_id=0, tokenizer=None))
    while core.sequences:
        core.step()
    return stream.result().prompt_logprobs


def _fingerprint(directory: Path) -> str:
    """Changes whenever the checkpoint's files do. Reads none of the weights, which may be gigabytes."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]
