"""The device's side of a step on a GPU: a plan in, tokens out.

Knows programs that are captured once and replayed, and when a step can be sent off before it is
asked for. Refuses to know why it is this plan and no other, and what a step computes.

While the same sequences go on and nothing else is to be done, the next steps can be foreseen: they
are sent off in groups, each step's token being the next one's input on the device, and a plan that
asks for such a step has only to fetch it. A step that nobody asks for is lost time and no more:
what it wrote lies past the end of what is remembered, and is written again before it is read.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from workers.engine.cuda.graphs import (
    CHUNK_SIZES,
    MAX_GROUP,
    Batch,
    BatchAttendFn,
    FirstDraws,
    PrefillProgram,
    Recorder,
    batch_sizes,
    fitting,
)
from workers.engine.cuda.kv_cache import CellCache
from workers.engine.model.loader import LoadedModel
from workers.engine.request import GeneratedToken
from workers.engine.runner import RunnerOutput, draw_all, draw_of, num_left
from workers.engine.sampling import (
    NUM_CANDIDATES,
    is_plain,
    limits,
    num_needed,
    sample,
    token_logprobs,
    uniform,
)
from workers.engine.scheduler_output import BatchRow, PrefillChunk, SchedulerOutput
from workers.engine.sequence import Sequence

log = logging.getLogger(__name__)

MAX_GROUP_MS = 5.0  # a group of steps that has been sent off cannot be called back

_Place = tuple[Sequence, int, int, int, int]  # a row: its entry, start, suffix and suffix's length
_Drawn = tuple[Sequence, GeneratedToken]
_Echo = tuple[Sequence, list[float]]


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step that has been sent off."""

    columns: dict[_Place, int]  # of the rows, in the batch
    logits: Tensor | None  # [size, vocab], where there are draws that the step leaves to others
    tokens: Tensor  # [2, size], on the host once it has landed
    landed: torch.cuda.Event | None  # None if it has


class CudaRunner:
    """Runs a model on a GPU, from one thread. Also on a CPU, where nothing is captured."""

    @torch.inference_mode()
    def __init__(self, loaded: LoadedModel, max_sequences: int) -> None:
        """
        Args:
            max_sequences: sequences that can run at once.

        Raises:
            MemoryError: if the device's free memory is too small for their keys and values.
        """
        self._model = loaded.model
        self._device = torch.device(loaded.device)
        self._is_cuda = self._device.type == "cuda"
        if self._device.index is not None and self._is_cuda:
            torch.cuda.set_device(self._device)
        dtype = self._model.token_embedding.dtype
        self._cache = CellCache(loaded.config, max_sequences, dtype, self._device)
        self.num_entries = self._cache.plan.num_entries
        log.info(
            "cache: %d prompts of %d tokens and %d suffixes, %d MiB on %s",
            *(self.num_entries, loaded.config.n_positions, max_sequences),
            *(self._cache.num_bytes >> 20, self._device),
        )
        attend = _kernel(loaded, dtype, self._device)
        self._batches = {size: Batch(self._model, self._cache, size, attend) for size in batch_sizes(max_sequences)}
        self._chunks = {size: PrefillProgram(self._model, self._cache, size) for size in CHUNK_SIZES}
        vocab_size = loaded.config.vocab_size
        logits = torch.zeros(max_sequences, vocab_size, device=self._device)
        self._first_draws = {size: FirstDraws(logits[:size]) for size in self._batches}
        self._kept_logits: dict[int, Tensor] = {}  # entry → [1 + drafted, vocab], up to the end of its prompt
        self._flights: deque[_InFlightStep] = deque()
        self._last: list[Sequence] = []  # whose step the last plan was
        self._num_alike = 0  # plans since that were for the same
        if self._is_cuda:
            self._capture()

    def _capture(self) -> None:
        start = time.monotonic()
        recorder = Recorder()
        try:
            for batch in reversed(self._batches.values()):  # the smaller fit where these were
                batch.capture(recorder)
            for chunk in reversed(self._chunks.values()):
                chunk.capture(recorder)
            for draws in reversed(self._first_draws.values()):
                draws.program.capture(recorder)
        except RuntimeError as error:
            log.warning("not everything is captured, the rest runs kernel by kernel: %s", error)
            torch.cuda.synchronize()
        lengths = self._batches[1].programs
        log.info(
            "captured in %.1f s: steps of %s sequences for texts of up to %s tokens, chunks of %s "
            "for up to %s; with texts of %d tokens a step takes %s ms",
            time.monotonic() - start,
            *(_listed(self._batches), _listed(lengths)),
            *(_listed(self._chunks), _listed(self._chunks[CHUNK_SIZES[0]].programs), min(lengths)),
            _listed(f"{batch.programs[min(lengths)].ms:.2f}" for batch in self._batches.values()),
        )

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput) -> RunnerOutput:
        """Carries out a plan."""
        for copy in plan.copies:
            self._cache.copy(copy)
        flight = self._flight_for(plan) if plan.rows else None
        # Before the chunks: a prompt that becomes complete may be in the entry of one that is ready.
        ready = [self._kept_logits[row.entry.index][-1 - len(row.sequence.forced_ids) :] for row in plan.ready]
        logits: list[Tensor] = []
        echoes: list[_Echo] = []
        for chunk in plan.chunks:
            hidden, after = self._compute(chunk)
            if chunk.is_last:
                if number := chunk.prompt.num_forced_ids:
                    last = chunk.stop - chunk.start
                    after = self._model.logits(hidden[last - 1 - number : last])
                self._kept_logits[chunk.entry.index] = after = after.clone()
                logits += [after] * len(chunk.drawing)
            if chunk.prompt.is_echoed:
                echoes += self._echo(chunk, hidden)
        first = self._draw_first(logits + ready, plan.draws[len(plan.rows) :])
        return RunnerOutput([*self._land(plan.rows, flight), *first()], echoes)

    def _flight_for(self, plan: SchedulerOutput) -> _InFlightStep:
        """The step of the plan's rows, sent off now if it was not foreseen; perhaps also more."""
        rows = plan.rows
        sequences = [row.sequence for row in rows]
        self._num_alike = self._num_alike + 1 if sequences == self._last else 0
        self._last = sequences
        if not self._flights or any(_place(row) not in self._flights[0].columns for row in rows):
            self._flights.clear()
            self._send(rows, 1)
        flight = self._flights.popleft()
        # Others who come or go make what is in flight worthless, so there is never more of it than
        # steps went by in peace.
        is_lonely = not plan.chunks and not plan.ready and len(flight.columns) == len(rows)
        if not self._flights and is_lonely and plan.allows_multi_step and all(_is_plain(row.sequence) for row in rows):
            most = min(map(num_left, rows)) - 1
            number = min(self._num_alike, most, MAX_GROUP)
            if number > 0:
                self._send(rows, number, ahead=1)
        return flight

    def _send(self, rows: Items[BatchRow], number: int, ahead: int = 0) -> None:
        """Sends off `number` steps or, where that would take too long, fewer.

        Args:
            ahead: steps of `rows` in flight, from the last of which this goes on.
        """
        batch = self._batches[fitting(tuple(self._batches), len(rows))]
        num_tokens = max(row.position for row in rows) + ahead + 1
        length = fitting(tuple(batch.programs), num_tokens)
        program = batch.programs[length]
        number = min(number, 1 + length - num_tokens, max(1, int(MAX_GROUP_MS / (program.ms or 1))))
        columns = [self._column(row, number, ahead) for row in rows]
        columns += [batch.padding] * (batch.size - len(rows))
        table = self._upload(torch.tensor(list(zip(*columns, strict=True)), dtype=torch.float64))
        # Where it goes on, the token is known to the device alone.
        first = 1 if ahead else 0
        batch.table[first:].copy_(table[first:], non_blocking=True)
        is_plain = all(_is_plain(row.sequence) for row in rows)
        for step in range(number):
            drawn = program()
            logits = None if is_plain else drawn.logits.clone()
            places = [_place(row, ahead + step) for row in rows]
            tokens, landed = self._download(drawn.tokens)
            columns_of = {place: column for column, place in enumerate(places)}
            self._flights.append(_InFlightStep(columns_of, logits, tokens, landed))

    def _column(self, row: BatchRow, number: int, ahead: int) -> tuple[float, ...]:
        """A row's column of its batch's table."""
        request, cells = row.sequence.request, self._cache.plan
        drawn = len(row.sequence.token_ids) + ahead
        uniforms = [uniform(request.seed, drawn + step) for step in range(number)]
        uniforms += [0.5] * (MAX_GROUP - number)
        return (
            *(row.sequence.token_ids[-1], row.start),
            *(cells.entry(row.entry.index), cells.suffix(row.suffix) - row.start),
            *(1, row.position + ahead, 0),
            *_limits(row.sequence),
            *uniforms,
        )

    def _land(self, rows: Items[BatchRow], flight: _InFlightStep | None) -> list[_Drawn]:
        """The tokens of the plan's rows; waits for them."""
        if flight is None:
            return []
        columns = [flight.columns[_place(row)] for row in rows]
        logits = [] if flight.logits is None else [flight.logits[at][None] for at in columns]
        steps = _steps(flight.tokens, flight.landed, columns)
        return _with_others([row.sequence for row in rows], steps, logits)

    def _draw_first(self, logits: list[Tensor], sequences: list[Sequence]) -> Callable[[], list[_Drawn]]:
        """Sends off the draw of a token from each of `logits` [1 + drafted, vocab]; call what it returns."""
        drafted = [(one, rows) for one, rows in zip(sequences, logits, strict=True) if one.forced_ids]
        if drafted:
            undrafted = [(one, rows) for one, rows in zip(sequences, logits, strict=True) if not one.forced_ids]
            first = self._draw_first([rows for _, rows in undrafted], [one for one, _ in undrafted])
            return lambda: [*first(), *_draw_drafted(drafted)]
        if not sequences:
            return list
        draws = self._first_draws[fitting(tuple(self._first_draws), len(sequences))]
        columns = [(*_limits(one), uniform(one.request.seed, 0)) for one in sequences]
        columns += [draws.padding] * (draws.size - len(columns))
        table = self._upload(torch.tensor(list(zip(*columns, strict=True)), dtype=torch.float64))
        draws.table.copy_(table, non_blocking=True)
        torch.cat(logits, out=draws.logits[: len(logits)])
        tokens, landed = self._download(draws.program())
        places = range(len(sequences))
        return lambda: _with_others(sequences, _steps(tokens, landed, places), logits)

    def _compute(self, chunk: PrefillChunk) -> tuple[Tensor, Tensor]:
        """Hidden states [tokens and padding, n_embd], and the logits [1, vocab] at their end.

        Both hold until the next chunk is computed.
        """
        tokens = chunk.prompt.tokens[chunk.start : chunk.stop]
        padded = self._chunks[fitting(CHUNK_SIZES, len(tokens))]
        numbers = padded.numbers(tokens, chunk.start, chunk.entry.index)
        padded.table.copy_(self._upload(torch.tensor(numbers)), non_blocking=True)
        return padded.programs[fitting(tuple(padded.programs), chunk.stop)]()

    def _echo(self, chunk: PrefillChunk, hidden: Tensor) -> list[_Echo]:
        """What the chunk says of the prompt's tokens that follow each of its own."""
        following = chunk.prompt.tokens[chunk.start + 1 : chunk.stop + 1]
        if not following:
            return []
        logprobs = token_logprobs(self._model.logits(hidden[: len(following)]), following)
        return [(one, logprobs) for one in chunk.prompt.members]

    def _upload(self, table: Tensor) -> Tensor:
        """`table` where a copy to the device need not wait; the allocator frees it after that."""
        return table.pin_memory() if self._is_cuda else table

    def _download(self, tokens: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """`tokens` on the host, and the event after which they are there."""
        if not self._is_cuda:
            return tokens, None
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return host, event


def _is_plain(sequence: Sequence) -> bool:
    """Whether a program draws its token; if not, it is drawn from its logits, on its own."""
    params = sequence.request.sampling
    is_ranked = params.first_rank > 0 and sequence.num_new == 0
    if not is_plain(params) or is_ranked or sequence.allowed_next() is not None:
        return False
    return num_needed(draw_of(sequence)) <= NUM_CANDIDATES


def _place(row: BatchRow, ahead: int = 0) -> _Place:
    """Where a row is, or will be so many steps later."""
    return row.sequence, row.entry.index, row.start, row.suffix, row.suffix_length + ahead


def _limits(sequence: Sequence) -> tuple[float, float, float]:
    """As `sampling.limits`, but a temperature of 0 stays one."""
    params = sequence.request.sampling
    _, top_k, top_p = limits(params)
    return params.temperature, top_k, top_p


def _steps(tokens: Tensor, landed: torch.cuda.Event | None, columns: Items[int]) -> list[GeneratedToken]:
    """Those of `columns`; waits until `tokens` [2, size] are there."""
    if landed is not None:
        landed.synchronize()
    ids, logprobs = tokens.tolist()
    return [GeneratedToken(int(ids[column]), logprobs[column]) for column in columns]


def _draw_drafted(drafted: Items[tuple[Sequence, Tensor]]) -> list[_Drawn]:
    """The tokens of sequences with a draft, each with its logits [1 + drafted, vocab]."""
    logits = torch.cat([rows for _, rows in drafted])
    sources = list(accumulate((len(rows) for _, rows in drafted), initial=0))[:-1]
    return draw_all([one for one, _ in drafted], sources, lambda places, draws: sample(logits[places], draws))


def _with_others(sequences: list[Sequence], steps: list[GeneratedToken], logits: list[Tensor]) -> list[_Drawn]:
    """Whose step is which, those drawn anew that no program draws.

    Args:
        logits: [1, vocab] of each sequence; read only where there are such.
    """
    others = [at for at, one in enumerate(sequences) if not _is_plain(one)]
    if others:
        draws = [draw_of(sequences[at]) for at in others]
        drawn = sample(torch.cat([logits[at] for at in others]), draws)
        for at, step in zip(others, drawn, strict=True):
            steps[at] = step
    return list(zip(sequences, steps, strict=True))


def _kernel(loaded: LoadedModel, dtype: torch.dtype, device: torch.device) -> BatchAttendFn | None:
    """The attention's own kernel, where there is Triton and it is right; plain torch does, too."""
    if device.type != "cuda":
        return None
    config = loaded.config
    try:
        from workers.engine.cuda import kernels as cuda_kernels

        if cuda_kernels.is_right(config.n_head, config.head_size, dtype, device):
            return cuda_kernels.attend
        log.warning("attention in plain torch: the Triton kernel gives something else here")
    except Exception as error:  # noqa: BLE001 - it compiles when first called
        log.warning("attention in plain torch: no Triton kernel (%s)", error)
    return None


def _listed(numbers: Iterable[object]) -> str:
    return ", ".join(map(str, numbers))
