"""Checks whether a checkpoint keeps its quality in int8, and chooses the CPU dtype accordingly.

The measure is perplexity on a bundled page of prose (from Jerome K. Jerome's "Three Men in a Boat", which the embedded
checkpoint was not trained on). Each checkpoint is measured once, and the ratio is cached on disk: int8 computes the
same bits on every CPU. The dtype is chosen anew at each load, because the next one may run on another CPU. Knows
checkpoints and perplexity. Does not know slots, servers or the cache's location.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from workers.checkpoints.measured import measured_once
from workers.engine.core import prompt_logprobs
from workers.engine.cpu.runner import CpuRunner
from workers.engine.cpu.team import Interrupt
from workers.engine.devices import cpu_dtype_problem
from workers.engine.loader import LoadedModel, load_model
from workers.text.tokenizer import Tokenizer

PAGE = Path(__file__).parent / "page.txt"
# int8 is rejected where it raises perplexity by more than 1 % over fp32.
MAX_RATIO = 1.01
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
    """The result of the check. The first call for a checkpoint loads it twice; `cache` as for `measured_once`."""

    def measure() -> Int8Check:
        check = check_int8(lambda dtype: load_model(directory, dtype=dtype, tokenizer=tokenizer), tokenizer)
        log.info("int8_measured", directory=str(directory), ratio=round(check.ratio, 4))
        return check

    return measured_once(directory, "int8", cache, Int8Check, measure)


def check_int8(load: Callable[[str], LoadedModel], tokenizer: Tokenizer) -> Int8Check:
    """Compare int8 with fp32 on the bundled page.

    Args:
        load: loads the model in a dtype.
    """
    ids = tokenizer.encode(PAGE.read_text(encoding="utf-8"))
    ratio = perplexity(load("int8"), ids) / perplexity(load("fp32"), ids)
    return Int8Check(ratio)


def perplexity(loaded: LoadedModel, token_ids: list[int]) -> float:
    """exp of the mean negative log-likelihood over the tokens that `prompt_logprobs` scores."""
    logprobs = prompt_logprobs(CpuRunner(loaded, 1, Interrupt()), loaded.config.n_positions, token_ids)
    return math.exp(-sum(logprobs) / len(logprobs))
