"""Checks whether a checkpoint keeps its quality in int8, and chooses the CPU dtype accordingly.

The measure is perplexity on a bundled page of prose (from Jerome K. Jerome's "Three Men in a Boat", which the embedded
checkpoint was not trained on). Each checkpoint is measured once, and the ratio is cached on disk: int8 computes the
same bits on every CPU. The dtype is chosen anew at each load, because the next one may run on another CPU. Knows
checkpoints and perplexity. Does not know slots, servers or the cache's location.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from shared.plain_files import read_plain
from shared.weights import weight_files
from workers.engine.core import EngineCore
from workers.engine.cpu.runner import CpuRunner
from workers.engine.cpu_check import cpu_dtype_problem
from workers.engine.interrupt import Interrupt
from workers.engine.loader import LoadedModel, load_model
from workers.engine.request import EngineRequest, SamplingParams
from workers.engine.result_stream import ResultStream
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence
from workers.text.tokenizer import Tokenizer

PAGE = Path(__file__).parent / "page.txt"
# int8 is rejected where it raises perplexity by more than 1 % over fp32.
MAX_RATIO = 1.01
WINDOW_TOKENS = 512
log = structlog.get_logger()


class Int8Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """int8's perplexity on the page divided by fp32's, as it is cached.

    Older versions also cached a dtype, or measured other kernels: their entries have other names, and are ignored.
    """

    ratio: float

    def choose_dtype(self) -> tuple[str, str | None]:
        """int8 if the checkpoint keeps its quality in it, else bf16, or fp32 on a CPU that computes no bf16.

        Returns:
            The dtype, and why it is neither int8 nor bf16.
        """
        if self.ratio <= MAX_RATIO:
            return "int8", None
        problem = cpu_dtype_problem("bf16")
        return ("bf16" if problem is None else "fp32"), problem


def cached_int8_check(directory: Path, tokenizer: Tokenizer, cache: Path | None) -> Int8Check:
    """The result of the check. The first call for a checkpoint loads it twice.

    Args:
        cache: the directory of cached results; where there is none, or it cannot be written to, the next call measures
            again.
    """
    path = None if cache is None else cache / f"{_fingerprint(directory)}-int8.json"
    if path is not None:
        try:
            return msgspec.json.decode(read_plain(path), type=Int8Check)
        except (OSError, msgspec.MsgspecError):
            pass  # not measured yet, or cached in another format
    check = check_int8(lambda dtype: load_model(directory, dtype=dtype, tokenizer=tokenizer), tokenizer)
    log.info("int8_measured", directory=str(directory), ratio=round(check.ratio, 4))
    if path is None:
        return check
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(msgspec.json.encode(check))
        written.replace(path)  # whatever stood there
    except OSError as error:
        log.warning("int8_result_discarded", path=str(path), reason=error.strerror)
    return check


def check_int8(load: Callable[[str], LoadedModel], tokenizer: Tokenizer) -> Int8Check:
    """Compare int8 with fp32 on the bundled page.

    Args:
        load: loads the model in a dtype.
    """
    ids = tokenizer.encode(PAGE.read_text(encoding="utf-8"))
    ratio = perplexity(load("int8"), ids) / perplexity(load("fp32"), ids)
    return Int8Check(ratio)


def perplexity(loaded: LoadedModel, token_ids: list[int]) -> float:
    """exp of the mean negative log-likelihood over all tokens except each window's first; windows do not overlap.

    Computed by the engine's runner with its KV cache, as for requests that are served.
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
    core = EngineCore(Scheduler(runner.num_entries, 1), runner, eos_ids=())
    request = EngineRequest(token_ids, SamplingParams(max_new_tokens=1), seed=0, echo_logprobs=True)
    stream = ResultStream()
    core.scheduler.add(Sequence(request, stream, start_id=0, healing=None))
    while core.scheduler.sequences:
        core.step()
    return stream.result().prompt_logprobs


def _fingerprint(directory: Path) -> str:
    """The cache key, from config.json and the weight files' names, sizes and times; weights are not read."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in weight_files(directory):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]
