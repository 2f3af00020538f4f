"""Runs scheduled steps on the CPU: a `SchedulerOutput` in, tokens out.

Knows when a step may be a multi-step decode, which rows need logits, and which logits to keep; knows neither the
policy behind a schedule nor the arithmetic of a step (`cpu.forward`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shared.free_memory import cache_budget_bytes
from workers.engine.batch import RunnerOutput, SchedulerOutput
from workers.engine.cpu.forward import ForwardPass
from workers.engine.cpu.kv_cache import CacheShape, KVCache
from workers.engine.cpu.sampler import can_draw
from workers.engine.cpu.team import Interrupt
from workers.engine.cpu_kernels import load_kernels
from workers.engine.draw import draw_all, draw_of
from workers.engine.model.transformer import LoadedModel
from workers.engine.paths import PathRanking
from workers.engine.request import PromptLogprobs
from workers.engine.scheduler import MAX_CHUNK
from workers.engine.sequence import MAX_MULTI_STEP_S, Sequence

log = logging.getLogger(__name__)

# Decode steps of one call: the watchdog sees calls, not steps.
MAX_STEPS_PER_CALL = 16


class CpuRunner:
    """Runs a model on the CPU, from one thread.

    Attributes:
        num_entries: prefix-cache entries.
        max_entry_tokens: tokens for which these together may take memory.
    """

    def __init__(
        self, loaded: LoadedModel, max_sequences: int, interrupt: Interrupt, cache_bytes: int | None = None
    ) -> None:
        """
        Args:
            max_sequences: sequences that can run at once.
            interrupt: stops a multi-step decode after the current step.
            cache_bytes: bound of the KV cache, which takes memory as it is used; by default a share of what is free.

        Raises:
            MemoryError: if that is too small for their keys and values.
        """
        config = loaded.config
        # float16 halves the bytes to read at each step. With fp32 weights, tokens must equal Hugging Face's in fp32.
        dtype = torch.float32 if loaded.dtype == "fp32" else torch.float16
        shape = CacheShape(config.n_layer, config.num_kv_heads, config.head_size, config.n_positions, dtype)
        self.num_entries = max_sequences
        self.max_entry_tokens = shape.max_entry_tokens(
            cache_budget_bytes() if cache_bytes is None else cache_bytes, max_sequences
        )
        self._cache = KVCache(shape, self.num_entries, max_sequences)
        log.info(
            "KV cache reserved: %d prefix-cache entries for %d tokens together, %d suffixes, up to %d MiB",
            self.num_entries,
            self.max_entry_tokens,
            max_sequences,
            min(
                self._cache.num_bytes,
                self.max_entry_tokens * shape.position_bytes + self._cache.suffixes.num_bytes,
            )
            >> 20,
        )
        kernels = loaded.kernels or load_kernels()
        self._forward = ForwardPass(loaded.model, shape, self._cache, max_sequences + MAX_CHUNK, interrupt, kernels)
        self._kept_logits: dict[int, Tensor] = {}  # entry → [1 + forced ids, vocab], at the end of its prompt
        self._step_s: dict[int, float] = {}  # number of rows → duration of a decode step, last measured

    @torch.inference_mode()
    def run(self, scheduled: SchedulerOutput) -> RunnerOutput:
        """Carries out a step: copies within the KV cache, then rows, chunks and draws."""
        for copy in scheduled.copies:
            self._cache.copy(copy)
        output = None if scheduled.chunks or scheduled.prefilled_rows else self._decode(scheduled)
        return output or self._forward_and_draw(scheduled)

    def drop_caches(self) -> None:
        """Drops the logits that it keeps, and the memory of the entries: the scheduler counts it from zero."""
        self._kept_logits.clear()
        for entry in range(self.num_entries):
            self._cache.entries.release(entry)

    def _decode(self, scheduled: SchedulerOutput) -> RunnerOutput | None:
        """One or more decode steps in one call; None where the kernels cannot draw the rows' tokens."""
        rows = scheduled.rows
        sequences = [row.sequence for row in rows]
        draws = [draw_of(sequence) for sequence in sequences]
        if len(rows) > self._forward.max_decode_rows or not all(
            draw.constraint is None and can_draw(draw) for draw in draws
        ):
            return None
        step_s = self._step_s.get(len(rows), MAX_MULTI_STEP_S)
        start = time.monotonic()
        num_affordable = int(scheduled.multi_step_budget_s(start) / step_s)
        num_steps = max(1, min(MAX_STEPS_PER_CALL, num_affordable, *(row.num_steps_left for row in rows)))
        steps = self._forward.decode(rows, draws, num_steps)
        self._step_s[len(rows)] = (time.monotonic() - start) / len(steps)
        return RunnerOutput([pair for step in steps for pair in zip(sequences, step, strict=True)], [], len(steps))

    def _forward_and_draw(self, scheduled: SchedulerOutput) -> RunnerOutput:
        """One step of any kind."""
        needed = logit_rows(scheduled)
        logits = self._forward.logits(scheduled, needed.wanted)
        sources, parts = needed.sources, [logits]
        num_rows = len(needed.wanted)
        for row in scheduled.prefilled_rows:
            kept = self._kept_logits[row.entry.index]
            sources.append(num_rows + len(kept) - 1 - len(row.sequence.forced_ids))
            parts.append(kept)
            num_rows += len(kept)
        # After the ready rows are read: a prompt that is complete may be in the entry that one of them was in.
        first = len(scheduled.rows)
        for chunk in scheduled.chunks:
            first += chunk.stop - chunk.start
            if chunk.is_last:
                last = needed.wanted.index(first - 1)
                self._kept_logits[chunk.entry.index] = logits[last - chunk.group.num_forced_ids : last + 1].clone()
        if len(parts) > 1:
            logits = torch.cat(parts)
        sample = partial(self._forward.sampler.sample, logits)
        return RunnerOutput(
            draw_all(scheduled.sampled_sequences, sources, sample, PathRanking(logits).tokens),
            self._echoes(scheduled, logits, needed.echoed),
        )

    def _echoes(
        self, scheduled: SchedulerOutput, logits: Tensor, echoed: Items[int]
    ) -> list[tuple[Sequence, PromptLogprobs]]:
        """Log-probabilities of the prompt tokens that follow each token of an echoed chunk."""
        echoes: list[tuple[Sequence, PromptLogprobs]] = []
        for first, chunk in zip(echoed, (chunk for chunk in scheduled.chunks if chunk.group.is_echoed), strict=True):
            if not (following := chunk.following_ids):
                continue
            for member in chunk.group.sequences:
                num_tops = member.request.sampling.top_logprobs
                echoes.append((member, self._forward.sampler.score(logits, first, following, num_tops)))
        return echoes


class LogitRows(NamedTuple):
    """The logits that a step needs; logits [wanted, vocab] are those of the rows `wanted`."""

    wanted: list[int]  # rows of the step, ascending
    sources: list[int]  # of each draw except those of the ready rows: its first row in the logits
    echoed: list[int]  # of each echoed chunk: its first row in the logits


def logit_rows(scheduled: SchedulerOutput) -> LogitRows:
    """Which rows of a step need logits: decode rows, the ends of prompts, forced prefixes, and echoed prompts."""
    wanted = list(range(len(scheduled.rows)))
    sources = list(wanted)
    echoed = []
    first = len(scheduled.rows)
    for chunk in scheduled.chunks:
        last = first + chunk.stop - chunk.start
        if chunk.group.is_echoed:
            echoed.append(len(wanted))
            wanted += range(first, last)
        elif chunk.is_last:
            wanted += range(last - 1 - chunk.group.num_forced_ids, last)
        if chunk.is_last:
            sources += [len(wanted) - 1 - chunk.group.num_forced_ids] * len(chunk.sampled_sequences)
        first = last
    return LogitRows(wanted, sources, echoed)
