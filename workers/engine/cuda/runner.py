"""Executes the scheduler's steps on a GPU.

While the same sequences run and nothing is prefilled, the next decode steps are predictable: they are launched
together, each with the token of the step before as its input on the device. `run` returns the tokens of steps that are
in flight already, of all that were launched together if no sequence needs its tokens earlier. An in-flight step that is
not used costs time and nothing else: it wrote behind the end of what is cached, and those KV slots are written again
before they are read.

Rows that the kernels cannot draw have their logits copied to the host, where `sampling.sample` draws them.

Knows CUDA graphs and which step to launch early. Does not know the scheduler's reasons, nor what a step computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import structlog
import torch
from torch import Tensor

from workers.engine.arithmetic_code import Code
from workers.engine.batch import BatchRow, PrefillChunk, RunnerOutput, SchedulerOutput
from workers.engine.cuda.forward import DecodeKernels
from workers.engine.cuda.graphs import (
    NUM_SEGMENTS,
    SEGMENT_TOKENS,
    Batch,
    FirstTokens,
    GraphRecorder,
    PrefillProgram,
    Program,
    Segment,
    batch_sizes,
    bucket_for,
)
from workers.engine.cuda.kernel_choice import choose_kernels, make_kernels
from workers.engine.cuda.kv_cache import KVCache
from workers.engine.cuda.step_kernels import AT, MAX_STEPS
from workers.engine.cuda.step_table import StepTable, first_column
from workers.engine.draw import NUM_CANDIDATES, draw_all, draw_of, num_needed
from workers.engine.failures import EngineFailure, LoadFailure
from workers.engine.foreign_errors import request_failure
from workers.engine.model.linear import HEAD_ROWS_MULTIPLE
from workers.engine.model.transformer import LoadedModel
from workers.engine.paths import PathRanking
from workers.engine.request import GeneratedToken, PromptLogprobs
from workers.engine.sampling import sample, score
from workers.engine.sequence import Sequence

log = structlog.get_logger()
Item = TypeVar("Item")
Out = TypeVar("Out")

MAX_LAUNCH_MS = 2.5  # of the steps launched together: they cannot be interrupted, and as many follow them
RECENT_SHARE = 0.1  # of the steps launched last, in the average duration of a step
UNTIMED_MS = 0.5  # stands for the duration of a step that is not captured: on a CPU, for tests

# A row of the batch at a certain step: entry, start, suffix and suffix length.
_RowState = tuple[int, int, int, int]
_Logits = tuple[Sequence, Tensor]  # of its next tokens, [1 + forced ids, vocab]
_Drawn = tuple[Sequence, GeneratedToken]
_Echo = tuple[Sequence, PromptLogprobs]
_Failed = tuple[Sequence, EngineFailure]
_Prefilled = tuple[PrefillChunk, Tensor, list[_Echo]]  # with the logits [1 + forced ids, vocab] at the chunk's end


@dataclass(slots=True)
class _InFlightSteps:
    """Decode steps that have been launched together.

    Attributes:
        columns: columns of the batch's table, for each row.
        states: state of each column's row before the first step.
        tokens: [steps, 4, size] on the host, as `StepKernels.draw` stores them; valid after `done`.
        logits: logits on the host of the columns whose tokens the step has not drawn; valid after `done`.
        program: computes a step.
        start, done: recorded before the first step and behind the last; None if everything is valid already.
        num_taken: steps whose tokens have been returned.
    """

    columns: dict[Sequence, int]
    states: list[_RowState]
    tokens: Tensor
    logits: dict[int, Tensor]
    program: Program[Tensor]
    start: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    num_taken: int = 0

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_taken

    def can_continue(self, rows: Items[BatchRow]) -> bool:
        """Whether the next step is the one that `rows` need."""
        columns, states, taken = self.columns, self.states, self.num_taken
        for row in rows:
            column = columns.get(row.sequence)
            if column is None or states[column] != _row_state(row, taken):
                return False
        return True


class CudaRunner:
    """Runs a model on a GPU, from one thread. For tests also on a CPU, where nothing is captured.

    Attributes:
        kernels: which kernels were chosen, and whether steps are CUDA graphs, for operators; empty on a CPU.
    """

    kernels = ""

    @torch.inference_mode()
    def __init__(
        self,
        loaded: LoadedModel,
        max_sequences: int,
        cache_bytes: int | None = None,
        kernels: DecodeKernels | None = None,
    ) -> None:
        """
        Args:
            max_sequences: sequences that can run at once.
            cache_bytes: memory of the KV cache; by default a share of what is free.
            kernels: kernels of the decode steps. None for those of `choose_kernels`.

        Raises:
            LoadFailure: if `cache_bytes` are not free, or a step cannot be captured as a CUDA graph.
            MemoryError: if the sequences' keys and values do not fit.
        """
        self._model = loaded.model
        self._device = torch.device(loaded.device)
        self._is_cuda = self._device.type == "cuda"
        if self._device.index is not None and self._is_cuda:
            torch.cuda.set_device(self._device)
        dtype = self._model.token_embedding.dtype
        # Partial sums of a product that is divided along the depth stay in float32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if kernels is None:
            # Before the cache is allocated: a check needs memory, too.
            choice = choose_kernels(loaded.config, dtype, max_sequences, self._device)
            kernels = make_kernels(choice.kernels, self._model, max_sequences, self._device)
            if self._is_cuda:
                self.kernels = f"{choice}; graphs: on"  # what cannot be captured is refused
        self._cache = KVCache(loaded.config, max_sequences, dtype, self._device, cache_bytes)
        self.num_entries = self._cache.layout.num_entries
        log.info(
            "kv_cache_allocated",
            device=str(self._device),
            memory_mib=self._cache.num_bytes >> 20,
            num_entries=self.num_entries,
            n_ctx=loaded.config.n_positions,
            num_suffixes=max_sequences,
        )
        sizes = batch_sizes(max_sequences)
        self._batches = {size: Batch(self._model, self._cache, size, kernels) for size in sizes}
        self._prefill_program = PrefillProgram(self._model, self._cache)
        vocab_size = loaded.config.vocab_size
        padded = vocab_size + -vocab_size % HEAD_ROWS_MULTIPLE
        logits = torch.zeros(max_sequences, padded, device=self._device)[:, :vocab_size]
        drawing = kernels.make(loaded.config.n_positions)
        self._first_tokens = {size: FirstTokens(logits[:size], drawing) for size in sizes}
        self._table = StepTable(self._cache.layout)
        self._kept_logits: dict[int, Tensor] = {}  # entry → [1 + forced ids, vocab], the last after its prompt
        self._in_flight: deque[_InFlightSteps] = deque()
        self._last_sequences: list[Sequence] = []  # of the rows of the last step
        self._num_unchanged = 0  # steps since with the same rows
        if self._is_cuda:
            self._capture()

    def _capture(self) -> None:
        """Captures everything; raises as `__init__`, or the device's error if the device has failed."""
        start = time.monotonic()
        recorder = GraphRecorder()
        try:
            for batch in reversed(self._batches.values()):  # largest first: the others reuse its memory
                batch.capture(recorder)
            self._prefill_program.capture(recorder)
            for first_tokens in reversed(self._first_tokens.values()):
                first_tokens.program.capture(recorder)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize()  # raises if the device has failed, rather than the capture
            raise LoadFailure(
                "A decode step could not be captured as a CUDA graph, and without graphs it would be several times "
                "slower: install the driver and the build of torch that docs/GPU.md names for this GPU; the worker's "
                "log has CUDA's reason."
            ) from error
        shortest = min(self._batches[1].programs)
        log.info(
            "cuda_graphs_captured",
            duration_s=round(time.monotonic() - start, 1),
            batch_buckets=list(self._batches),
            length_buckets=list(self._batches[1].programs),
            shortest=shortest,
            ms_per_step=[round(batch.programs[shortest].ms, 2) for batch in self._batches.values()],
        )

    @torch.inference_mode()
    def run(self, scheduled: SchedulerOutput) -> RunnerOutput:
        """Executes one step."""
        for copy in scheduled.copies:
            self._cache.copy(copy)
        steps, num_steps = self._steps_of(scheduled) if scheduled.rows else (None, 1)
        # Before the chunks, whose logits may replace those of the same entry.
        ready = [
            self._kept_logits[row.entry.index][-1 - len(row.sequence.forced_ids) :] for row in scheduled.prefilled_rows
        ]
        logits: list[Tensor] = []
        echoes: list[_Echo] = []
        failures: list[_Failed] = []
        sampled: list[Sequence] = []
        for chunk, after, echo in _together_or_alone(
            scheduled.chunks, self._prefill, lambda chunk: chunk.group.sequences, failures
        ):
            logits += [after] * len(chunk.sampled_sequences)
            sampled += chunk.sampled_sequences
            echoes += echo
        sampled += [row.sequence for row in scheduled.prefilled_rows]
        first = self._draw_first(logits + ready, sampled, failures)
        drawn = [] if steps is None else self._collect(scheduled.rows, steps, num_steps, failures)
        return RunnerOutput(drawn + first(), echoes, num_steps, failures)

    @torch.inference_mode()
    def drop_caches(self) -> None:
        """Drops kept logits and in-flight steps, and clears the KV cache: masked values must not be NaN."""
        self._kept_logits.clear()
        self._in_flight.clear()
        self._last_sequences = []
        self._cache.clear()
        if self._is_cuda:
            torch.cuda.empty_cache()

    def _steps_of(self, scheduled: SchedulerOutput) -> tuple[_InFlightSteps, int]:
        """Steps of the scheduled rows, launched now if they were not before, and how many of them to wait for.

        May launch the steps after them.
        """
        rows = scheduled.rows
        sequences = [row.sequence for row in rows]
        self._num_unchanged = self._num_unchanged + 1 if sequences == self._last_sequences else 0
        self._last_sequences = sequences
        if not self._in_flight or not self._in_flight[0].can_continue(rows):
            self._in_flight.clear()
            self._launch(rows, 1)
        steps = self._in_flight[0]
        # A sequence that arrives or ends makes the in-flight steps useless, so launch no more of them than there were
        # steps without such a change.
        is_unchanged = not scheduled.chunks and not scheduled.prefilled_rows and len(steps.columns) == len(rows)
        is_predictable = is_unchanged and scheduled.allows_multi_step and not steps.logits
        num_taken = 1
        if is_predictable and steps.num_left > 1:
            budget_s = scheduled.multi_step_budget_s(time.monotonic())
            if budget_s >= 1e-3 * (steps.program.ms or UNTIMED_MS) * steps.num_left:
                num_taken = steps.num_left
        self._num_unchanged += num_taken - 1
        if num_taken == steps.num_left:
            self._in_flight.popleft()
            if not self._in_flight and is_predictable:
                num_steps = min(self._num_unchanged, min(row.num_steps_left for row in rows) - num_taken, MAX_STEPS)
                if num_steps > 0:
                    self._launch(rows, num_steps, steps)
        return steps, num_taken

    def _launch(self, rows: Items[BatchRow], num_steps: int, before: _InFlightSteps | None = None) -> None:
        """Launches up to `num_steps` decode steps; fewer if they would take more than MAX_LAUNCH_MS.

        Args:
            before: the steps of the same rows that were launched last, which these continue.
        """
        batch = self._batches[bucket_for(tuple(self._batches), len(rows))]
        ahead = 0 if before is None else before.num_left
        num_tokens = max([row.position for row in rows]) + ahead + 1
        length = bucket_for(tuple(batch.programs), num_tokens)
        program = batch.programs[length]
        step_ms = program.ms or UNTIMED_MS
        num_steps = min(num_steps, 1 + length - num_tokens, max(1, int(MAX_LAUNCH_MS / step_ms)))
        others: list[int] = []
        if before is None:
            table = self._table.start(rows, batch.padding, batch.size, num_steps)
            batch.table.copy_(self._upload(table), non_blocking=True)
            columns = {row.sequence: column for column, row in enumerate(rows)}
            states = [_row_state(row) for row in rows]
            others = [column for column, row in enumerate(rows) if not _is_plain(row.sequence)]
        else:  # the device has advanced the rows before AT
            batch.table[AT:].copy_(self._upload(self._table.extend(num_steps)), non_blocking=True)
            columns, states, past = before.columns, before.states, len(before.tokens)
            states = [(entry, start, suffix, length + past) for entry, start, suffix, length in states]
        tokens = self._host_memory((num_steps, 4, batch.size), torch.float64)
        steps = _InFlightSteps(columns, states, tokens, {}, program, self._record_event())
        for _ in range(num_steps):
            logits = program()
            steps.logits.update((column, self._download(logits[column])) for column in others)
        tokens.copy_(batch.tokens[:num_steps], non_blocking=True)
        steps.done = self._record_event()
        self._in_flight.append(steps)

    def _collect(
        self, rows: Items[BatchRow], steps: _InFlightSteps, num_steps: int, failures: list[_Failed]
    ) -> list[_Drawn]:
        """The tokens of the next `num_steps` of `steps`, step by step; waits until they are computed.

        Args:
            failures: sequences whose draw fails are appended.
        """
        stop = steps.num_taken + num_steps
        if steps.done is not None and steps.start is not None:
            steps.done.synchronize()
            if not steps.num_taken:
                ms = steps.start.elapsed_time(steps.done) / len(steps.tokens)
                steps.program.ms += RECENT_SHARE * (ms - steps.program.ms)
        columns = [steps.columns[row.sequence] for row in rows]
        drawn: list[_Drawn] = []
        for step in steps.tokens[steps.num_taken : stop]:
            tokens = _drawn_tokens(step)
            drawn += [(row.sequence, tokens[column]) for row, column in zip(rows, columns, strict=True)]
        steps.num_taken = stop
        if steps.logits:
            others = [number for number, column in enumerate(columns) if column in steps.logits]
            pairs = [(rows[number].sequence, steps.logits[columns[number]][None]) for number in others]
            drawn = [pair for number, pair in enumerate(drawn) if number not in others]
            drawn += _draw_on_host(pairs, failures)
        return drawn

    def _draw_first(
        self, logits: list[Tensor], sequences: list[Sequence], failures: list[_Failed]
    ) -> Callable[[], list[_Drawn]]:
        """Launches the draw of each sequence's first tokens; the function that it returns waits for them.

        Args:
            logits: [1 + forced ids, vocab] of each sequence.
            failures: sequences whose draw fails are appended, by the function that is returned.
        """
        if not sequences:
            return list
        others = [at for at, one in enumerate(sequences) if one.forced_ids or not _is_plain(one)]
        on_host = [(sequences[at], self._download(logits[at])) for at in others]
        plain = [at for at in range(len(sequences)) if at not in others]
        tokens = self._draw_plain([logits[at] for at in plain], [sequences[at] for at in plain])
        event = self._record_event()

        def collect() -> list[_Drawn]:
            if event is not None:
                event.synchronize()
            drawn = [(sequences[at], token) for at, token in zip(plain, _drawn_tokens(tokens), strict=False)]
            return drawn + (_draw_on_host(on_host, failures) if others else [])

        return collect

    def _draw_plain(self, logits: list[Tensor], sequences: list[Sequence]) -> Tensor:
        """[4, sequences or more] tokens on the host, not valid before an event that is recorded after this."""
        if not sequences:
            return torch.empty(4, 0)
        program = self._first_tokens[bucket_for(tuple(self._first_tokens), len(sequences))]
        columns = [first_column(one) for one in sequences]
        columns += [program.padding] * (program.size - len(columns))
        table = self._upload(torch.tensor(list(zip(*columns, strict=True)), dtype=torch.float64))
        program.table.copy_(table, non_blocking=True)
        torch.cat(logits, out=program.logits[: len(logits)])
        program.program()
        return self._download(program.tokens[0])

    def _prefill(self, chunks: Items[PrefillChunk]) -> list[_Prefilled]:
        """Computes chunks, NUM_SEGMENTS segments at a time."""
        segments = [(chunk, segment) for chunk in chunks for segment in _segments(chunk)]
        program = self._prefill_program
        done: list[_Prefilled] = []
        hidden: list[Tensor] = []  # of the chunk so far
        for first in range(0, len(segments), NUM_SEGMENTS):
            together = segments[first : first + NUM_SEGMENTS]
            numbers = program.numbers([segment for _, segment in together])
            program.table.copy_(self._upload(torch.tensor(numbers)), non_blocking=True)
            states, logits = program(max(segment.stop for _, segment in together))
            for number, (chunk, segment) in enumerate(together):
                if chunk.group.is_echoed or chunk.group.num_forced_ids:
                    hidden.append(states[number, : len(segment.tokens)].clone())  # before the next program runs
                if segment.stop == chunk.stop:
                    done.append(self._finish(chunk, hidden, logits[number : number + 1]))
                    hidden = []
        return done

    def _finish(self, chunk: PrefillChunk, hidden: list[Tensor], after: Tensor) -> _Prefilled:
        """Keeps the logits at the end of a prompt.

        Args:
            hidden: hidden states of the chunk's tokens, if they are needed.
            after: logits [1, vocab] after its last token, which the next program overwrites.
        """
        echo = self._echo(chunk, torch.cat(hidden)) if chunk.group.is_echoed else []
        if chunk.is_last:
            if number := chunk.group.num_forced_ids:
                after = self._model.logits(torch.cat(hidden)[-1 - number :])
            self._kept_logits[chunk.entry.index] = after = after.clone()
        return chunk, after, echo

    def _echo(self, chunk: PrefillChunk, hidden: Tensor) -> list[_Echo]:
        """Log-probabilities of the prompt's tokens that follow each token of the chunk."""
        if not (following := chunk.following_ids):
            return []
        logits = self._model.logits(hidden[: len(following)])
        return [(one, score(logits, following, one.request.sampling.top_logprobs)) for one in chunk.group.sequences]

    def _record_event(self) -> torch.cuda.Event | None:
        if not self._is_cuda:
            return None
        # Waiting for it blocks: a thread that polls would take a core from the HTTP threads.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _upload(self, table: Tensor) -> Tensor:
        """`table` in pinned memory, from which it is copied without waiting; freed once the copy is done."""
        return table.pin_memory() if self._is_cuda else table

    def _download(self, source: Tensor) -> Tensor:
        """A copy of `source` on the host, not valid before an event that is recorded after this."""
        host = self._host_memory(source.shape, source.dtype)
        host.copy_(source, non_blocking=True)
        return host

    def _host_memory(self, shape: Items[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the device can write: pinned, if it is a GPU."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_cuda)


def _segments(chunk: PrefillChunk) -> list[Segment]:
    tokens = chunk.group.tokens
    starts = range(chunk.start, chunk.stop, SEGMENT_TOKENS)
    stops = [min(start + SEGMENT_TOKENS, chunk.stop) for start in starts]
    pairs = zip(starts, stops, strict=True)
    return [Segment(tokens[start:stop], start, chunk.entry.index) for start, stop in pairs]


def _drawn_tokens(drawn: Tensor) -> list[GeneratedToken]:
    """The tokens of each column of `drawn` [4, columns], as `StepKernels.draw` stores them."""
    columns = zip(*drawn.tolist(), strict=True)
    return [GeneratedToken(int(id_), logprob, code=Code(point, width)) for id_, logprob, point, width in columns]


def _row_state(row: BatchRow, num_steps: int = 0) -> _RowState:
    """A row as it was `num_steps` decode steps ago."""
    return row.entry.index, row.start, row.suffix, row.suffix_length - num_steps


def _is_plain(sequence: Sequence) -> bool:
    """Whether the kernels of a step can draw its token; if not, `sampling.sample` does."""
    params = sequence.request.sampling
    is_ranked = (params.first_rank > 0 and sequence.num_new == 0) or sequence.starts_with_path
    if not params.is_plain or is_ranked or sequence.allowed_next() is not None:
        return False
    return num_needed(draw_of(sequence)) <= NUM_CANDIDATES


def _together_or_alone(
    items: Items[Item],
    compute: Callable[[Items[Item]], list[Out]],
    sequences_of: Callable[[Item], Items[Sequence]],
    failures: list[_Failed],
) -> list[Out]:
    """What `compute` returns for all items, or for each alone if the memory does not suffice for all together.

    Args:
        failures: the sequences of the items for which it does not suffice alone are appended.
    """
    try:
        return compute(items)
    except Exception as error:  # noqa: BLE001 - raised again if it is not of these items alone
        failure = request_failure(error)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()  # what is free but in pieces may do for the next request
    if len(items) == 1:
        failures += [(sequence, failure) for sequence in sequences_of(items[0])]
        return []
    return [out for item in items for out in _together_or_alone([item], compute, sequences_of, failures)]


def _draw_on_host(logits: Items[_Logits], failures: list[_Failed]) -> list[_Drawn]:
    """The next tokens of sequences; appends to `failures` as `_together_or_alone`."""
    return _together_or_alone(logits, _draw_together, lambda pair: [pair[0]], failures)


def _draw_together(logits: Items[_Logits]) -> list[_Drawn]:
    sequences, parts = [one for one, _ in logits], [part for _, part in logits]
    rows = torch.cat(parts)
    sources = list(accumulate(map(len, parts), initial=0))[:-1]
    return draw_all(sequences, sources, lambda places, draws: sample(rows[places], draws), PathRanking(rows).tokens)
