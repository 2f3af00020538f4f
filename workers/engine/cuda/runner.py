"""Executes the scheduler's steps on a GPU.

While the same sequences run and nothing is prefilled, the next decode steps are predictable: they are launched
together, each with the token of the step before as its input on the device, and `run` only collects the result of a
step that is in flight already. An in-flight step that is not used costs time and nothing else: it wrote behind the end
of what is cached, and those KV slots are written again before they are read.

Knows CUDA graphs and which step to launch early. Does not know the scheduler's reasons, nor what a step computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate

import structlog
import torch
from torch import Tensor

from workers.engine.cuda.graphs import (
    CHUNK_SIZES,
    Batch,
    BatchAttendFn,
    FirstTokens,
    GraphRecorder,
    PrefillProgram,
    batch_sizes,
    bucket_for,
)
from workers.engine.cuda.kv_cache import KVCache
from workers.engine.cuda.step_kernels import MAX_STEPS
from workers.engine.model.gpt2 import LoadedModel
from workers.engine.request import GeneratedToken, PromptLogprobs
from workers.engine.runner import RunnerOutput, draw_all, draw_of, num_left
from workers.engine.sampling import (
    NUM_CANDIDATES,
    limits,
    num_needed,
    sample,
    score,
    uniform,
)
from workers.engine.scheduler_output import BatchRow, PrefillChunk, SchedulerOutput
from workers.engine.sequence import Sequence

log = structlog.get_logger()

MAX_LAUNCH_MS = 5.0  # of the steps launched together: they cannot be interrupted

# A row of the batch at a certain step: sequence, entry, start, suffix and suffix length.
_RowState = tuple[Sequence, int, int, int, int]
_Drawn = tuple[Sequence, GeneratedToken]
_Echo = tuple[Sequence, PromptLogprobs]


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A decode step that has been launched.

    Attributes:
        columns: of the batch's table, for each row.
        logits: [size, vocab]; None if the step has drawn all tokens itself.
        tokens: [2, size] on the host, valid after `is_done`.
        is_done: None if they are valid already.
    """

    columns: dict[_RowState, int]
    logits: Tensor | None
    tokens: Tensor
    is_done: torch.cuda.Event | None


class CudaRunner:
    """Runs a model on a GPU, from one thread. For tests also on a CPU, where nothing is captured."""

    @torch.inference_mode()
    def __init__(self, loaded: LoadedModel, max_sequences: int, cache_bytes: int | None = None) -> None:
        """
        Args:
            max_sequences: sequences that can run at once.
            cache_bytes: memory of the KV cache; by default a share of what is free.

        Raises:
            LoadFailure: if `cache_bytes` are not free.
            MemoryError: if the sequences' keys and values do not fit.
        """
        self._model = loaded.model
        self._device = torch.device(loaded.device)
        self._is_cuda = self._device.type == "cuda"
        if self._device.index is not None and self._is_cuda:
            torch.cuda.set_device(self._device)
        dtype = self._model.token_embedding.dtype
        self._cache = KVCache(loaded.config, max_sequences, dtype, self._device, cache_bytes)
        self.num_entries = self._cache.layout.num_entries
        log.info(
            "kv_cache_allocated", device=str(self._device), memory_mib=self._cache.num_bytes >> 20,
            num_entries=self.num_entries, n_ctx=loaded.config.n_positions, num_suffixes=max_sequences,
        )  # fmt: skip
        attend = attention_kernel(loaded, dtype, self._device)
        self._batches = {size: Batch(self._model, self._cache, size, attend) for size in batch_sizes(max_sequences)}
        self._chunks = {size: PrefillProgram(self._model, self._cache, size) for size in CHUNK_SIZES}
        vocab_size = loaded.config.vocab_size
        logits = torch.zeros(max_sequences, vocab_size, device=self._device)
        self._first_tokens = {size: FirstTokens(logits[:size]) for size in self._batches}
        self._kept_logits: dict[int, Tensor] = {}  # entry → [1 + forced ids, vocab], the last after its prompt
        self._in_flight: deque[_InFlightStep] = deque()
        self._last_sequences: list[Sequence] = []  # of the rows of the last step
        self._num_unchanged = 0  # steps since with the same rows
        if self._is_cuda:
            self._capture()

    def _capture(self) -> None:
        start = time.monotonic()
        recorder = GraphRecorder()
        try:
            for batch in reversed(self._batches.values()):  # largest first: the others reuse its memory
                batch.capture(recorder)
            for chunk in reversed(self._chunks.values()):
                chunk.capture(recorder)
            for first_tokens in reversed(self._first_tokens.values()):
                first_tokens.program.capture(recorder)
        except RuntimeError as error:
            log.warning("cuda_graph_capture_failed", reason=str(error))  # what is not captured runs kernel by kernel
            torch.cuda.synchronize()
        shortest = min(self._batches[1].programs)
        log.info(
            "cuda_graphs_captured", duration_s=round(time.monotonic() - start, 1), batch_buckets=list(self._batches),
            length_buckets=list(self._batches[1].programs), chunk_buckets=list(self._chunks), shortest=shortest,
            ms_per_step=[round(batch.programs[shortest].ms, 2) for batch in self._batches.values()],
        )  # fmt: skip

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput) -> RunnerOutput:
        """Executes one step."""
        for copy in plan.copies:
            self._cache.copy(copy)
        step = self._step_of(plan) if plan.rows else None
        # Before the chunks, whose logits may replace those of the same entry.
        ready = [self._kept_logits[row.entry.index][-1 - len(row.sequence.forced_ids) :] for row in plan.prefilled_rows]
        logits: list[Tensor] = []
        echoes: list[_Echo] = []
        for chunk in plan.chunks:
            hidden, after = self._compute(chunk)
            if chunk.is_last:
                if number := chunk.group.num_forced_ids:
                    last = chunk.stop - chunk.start
                    after = self._model.logits(hidden[last - 1 - number : last])
                self._kept_logits[chunk.entry.index] = after = after.clone()
                logits += [after] * len(chunk.sampled_sequences)
            if chunk.group.is_echoed:
                echoes += self._echo(chunk, hidden)
        first = self._draw_first(logits + ready, plan.sampled_sequences[len(plan.rows) :])
        return RunnerOutput([*self._collect(plan.rows, step), *first()], echoes)

    @torch.inference_mode()
    def drop_caches(self) -> None:
        """Drops kept logits and in-flight steps, and clears the KV cache: masked values must not be NaN."""
        self._kept_logits.clear()
        self._in_flight.clear()
        self._last_sequences = []
        self._cache.clear()
        if self._is_cuda:
            torch.cuda.empty_cache()

    def _step_of(self, plan: SchedulerOutput) -> _InFlightStep:
        """The in-flight step of the plan's rows, launched now if it was not before. May launch the steps after it."""
        rows = plan.rows
        sequences = [row.sequence for row in rows]
        self._num_unchanged = self._num_unchanged + 1 if sequences == self._last_sequences else 0
        self._last_sequences = sequences
        if not self._in_flight or any(_row_state(row) not in self._in_flight[0].columns for row in rows):
            self._in_flight.clear()
            self._launch(rows, 1)
        step = self._in_flight.popleft()
        # A sequence that arrives or ends makes the in-flight steps useless, so launch no more of them than there were
        # steps without such a change.
        is_unchanged = not plan.chunks and not plan.prefilled_rows and len(step.columns) == len(rows)
        is_predictable = is_unchanged and plan.allows_multi_step and all(_is_plain(row.sequence) for row in rows)
        if not self._in_flight and is_predictable:
            num_steps = min(self._num_unchanged, min(map(num_left, rows)) - 1, MAX_STEPS)
            if num_steps > 0:
                self._launch(rows, num_steps, ahead=1)
        return step

    def _launch(self, rows: Items[BatchRow], num_steps: int, ahead: int = 0) -> None:
        """Launches up to `num_steps` decode steps; fewer if they would take more than MAX_LAUNCH_MS.

        Args:
            ahead: steps of `rows` that are in flight, which the launched steps continue.
        """
        batch = self._batches[bucket_for(tuple(self._batches), len(rows))]
        num_tokens = max(row.position for row in rows) + ahead + 1
        length = bucket_for(tuple(batch.programs), num_tokens)
        program = batch.programs[length]
        num_steps = min(num_steps, 1 + length - num_tokens, max(1, int(MAX_LAUNCH_MS / (program.ms or 1))))
        columns = [self._column(row, num_steps, ahead) for row in rows]
        columns += [batch.padding] * (batch.size - len(rows))
        table = self._upload(torch.tensor(list(zip(*columns, strict=True)), dtype=torch.float64))
        # The token of a step in flight is known to the device only.
        first = 1 if ahead else 0
        batch.table[first:].copy_(table[first:], non_blocking=True)
        is_plain = all(_is_plain(row.sequence) for row in rows)
        for step in range(num_steps):
            result = program()
            logits = None if is_plain else result.logits.clone()
            column_of = {_row_state(row, ahead + step): column for column, row in enumerate(rows)}
            self._in_flight.append(_InFlightStep(column_of, logits, *self._download(result.tokens)))

    def _column(self, row: BatchRow, num_steps: int, ahead: int) -> tuple[float, ...]:
        """A row's column of its batch's table, for `num_steps` steps after `ahead` steps in flight."""
        request, layout = row.sequence.request, self._cache.layout
        num_drawn = len(row.sequence.token_ids) + ahead
        uniforms = [uniform(request.seed, num_drawn + step) for step in range(num_steps)]
        uniforms += [0.5] * (MAX_STEPS - num_steps)
        return (
            *(row.sequence.token_ids[-1], row.start),
            *(layout.first_of_entry(row.entry.index), layout.first_of_suffix(row.suffix) - row.start),
            *(1, row.position + ahead, 0),
            *_limits(row.sequence),
            *uniforms,
        )

    def _collect(self, rows: Items[BatchRow], step: _InFlightStep | None) -> list[_Drawn]:
        """The tokens of `rows`; waits until the step is done."""
        if step is None:
            return []
        columns = [step.columns[_row_state(row)] for row in rows]
        logits = [] if step.logits is None else [step.logits[column][None] for column in columns]
        tokens = _tokens(step.tokens, step.is_done, columns)
        return _with_sampled([row.sequence for row in rows], tokens, logits)

    def _draw_first(self, logits: list[Tensor], sequences: list[Sequence]) -> Callable[[], list[_Drawn]]:
        """Launches the draw of each sequence's first tokens; the function that it returns waits for them.

        Args:
            logits: [1 + forced ids, vocab] of each sequence.
        """
        forced = [(one, rows) for one, rows in zip(sequences, logits, strict=True) if one.forced_ids]
        if forced:
            free = [(one, rows) for one, rows in zip(sequences, logits, strict=True) if not one.forced_ids]
            first = self._draw_first([rows for _, rows in free], [one for one, _ in free])
            return lambda: [*first(), *_draw_forced(forced)]
        if not sequences:
            return list
        program = self._first_tokens[bucket_for(tuple(self._first_tokens), len(sequences))]
        columns = [(*_limits(one), uniform(one.request.seed, 0)) for one in sequences]
        columns += [program.padding] * (program.size - len(columns))
        table = self._upload(torch.tensor(list(zip(*columns, strict=True)), dtype=torch.float64))
        program.table.copy_(table, non_blocking=True)
        torch.cat(logits, out=program.logits[: len(logits)])
        tokens, is_done = self._download(program.program())
        places = range(len(sequences))
        return lambda: _with_sampled(sequences, _tokens(tokens, is_done, places), logits)

    def _compute(self, chunk: PrefillChunk) -> tuple[Tensor, Tensor]:
        """Hidden states [tokens and padding, n_embd], and the logits [1, vocab] after the last token.

        Both are valid until the next chunk is computed.
        """
        tokens = chunk.group.tokens[chunk.start : chunk.stop]
        padded = self._chunks[bucket_for(CHUNK_SIZES, len(tokens))]
        numbers = padded.numbers(tokens, chunk.start, chunk.entry.index)
        padded.table.copy_(self._upload(torch.tensor(numbers)), non_blocking=True)
        return padded.programs[bucket_for(tuple(padded.programs), chunk.stop)]()

    def _echo(self, chunk: PrefillChunk, hidden: Tensor) -> list[_Echo]:
        """Log-probabilities of the prompt's tokens that follow each token of the chunk."""
        if not (following := chunk.following_ids):
            return []
        logits = self._model.logits(hidden[: len(following)])
        return [(one, score(logits, following, one.request.sampling.top_logprobs)) for one in chunk.group.sequences]

    def _upload(self, table: Tensor) -> Tensor:
        """`table` in pinned memory, from which it is copied without waiting; freed once the copy is done."""
        return table.pin_memory() if self._is_cuda else table

    def _download(self, tokens: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """`tokens` on the host, and the event after which they are valid; None if they are."""
        if not self._is_cuda:
            return tokens, None
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return host, event


def _is_plain(sequence: Sequence) -> bool:
    """Whether the graph of a step draws its token; if not, `sampling.sample` does."""
    params = sequence.request.sampling
    is_ranked = params.first_rank > 0 and sequence.num_new == 0
    if not params.is_plain or is_ranked or sequence.allowed_next() is not None:
        return False
    return num_needed(draw_of(sequence)) <= NUM_CANDIDATES


def _row_state(row: BatchRow, ahead: int = 0) -> _RowState:
    """A row as it is after `ahead` further decode steps."""
    return row.sequence, row.entry.index, row.start, row.suffix, row.suffix_length + ahead


def _limits(sequence: Sequence) -> tuple[float, float, float]:
    """As `sampling.limits`, but with a temperature of 0 for greedy draws."""
    params = sequence.request.sampling
    _, top_k, top_p = limits(params)
    return params.temperature, top_k, top_p


def _tokens(tokens: Tensor, is_done: torch.cuda.Event | None, columns: Items[int]) -> list[GeneratedToken]:
    """Those of `columns`; waits until `tokens` [2, size] are valid."""
    if is_done is not None:
        is_done.synchronize()
    ids, logprobs = tokens.tolist()
    return [GeneratedToken(int(ids[column]), logprobs[column]) for column in columns]


def _draw_forced(forced: Items[tuple[Sequence, Tensor]]) -> list[_Drawn]:
    """The tokens of sequences with forced ids, each with its logits [1 + forced ids, vocab]."""
    logits = torch.cat([rows for _, rows in forced])
    sources = list(accumulate((len(rows) for _, rows in forced), initial=0))[:-1]
    return draw_all([one for one, _ in forced], sources, lambda places, draws: sample(logits[places], draws))


def _with_sampled(sequences: list[Sequence], tokens: list[GeneratedToken], logits: list[Tensor]) -> list[_Drawn]:
    """Each sequence with its token, drawn by `sample` if the graph could not draw it.

    Args:
        logits: [1, vocab] of each sequence; read only if there are such.
    """
    others = [at for at, one in enumerate(sequences) if not _is_plain(one)]
    if others:
        draws = [draw_of(sequences[at]) for at in others]
        drawn = sample(torch.cat([logits[at] for at in others]), draws)
        for at, token in zip(others, drawn, strict=True):
            tokens[at] = token
    return list(zip(sequences, tokens, strict=True))


def attention_kernel(loaded: LoadedModel, dtype: torch.dtype, device: torch.device) -> BatchAttendFn | None:
    """The Triton attention kernel; None for plain torch if there is no Triton, or the kernel is not correct here."""
    if device.type != "cuda":
        return None
    config = loaded.config
    try:
        from workers.engine.cuda import kernels as cuda_kernels

        if cuda_kernels.is_correct(config.n_head, config.head_size, dtype, device):
            return cuda_kernels.attend
        log.warning("triton_kernel_rejected", reason="its results differ from attention in plain torch")
    except Exception as error:  # noqa: BLE001 - it is compiled on the first call
        log.warning("triton_kernel_rejected", reason=str(error))
    return None
