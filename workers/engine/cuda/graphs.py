"""A step's arithmetic as functions of tensors that stay where they are, to be captured as graphs.

Knows the model, the cells and the sampler. Refuses to know plans and sequences.

Everything that changes from step to step is in a small table on the device; nothing here looks at
it from the host. A batch has one of a few sizes and reads one of a few lengths, so there is a
program for each pair; the places left over are padding, which reads and writes the scrap cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from workers.engine.cuda.kv_cache import CellCache
from workers.engine.model.gpt2 import GPT2, AttendFn
from workers.engine.sampling import NUM_CANDIDATES, first_of_equals, pick

# Steps whose uniform numbers fit in a table: as many can be sent off at once.
MAX_GROUP = 16
# cuDNN's attention is built anew for each shape, while someone waits.
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LENGTHS = (64, 128, 256, 512)  # tokens read; the context's length is added
CHUNK_SIZES = (16, 32, 64, 128, 256)

# Rows of a batch's table; the first are whole numbers.
ID, START, ENTRY, SUFFIX, MOVES, POSITION, AT, TEMPERATURE, TOP_K, TOP_P, UNIFORMS = range(11)
TABLE_ROWS = UNIFORMS + MAX_GROUP

Out = TypeVar("Out")
# [texts, 3 · n_embd], [cells, 2, heads, head_size], [whole rows of the table, texts] →
# [texts, n_embd]; stores the new tokens
BatchAttendFn = Callable[[Tensor, Tensor, Tensor], Tensor]


def batch_sizes(most: int) -> tuple[int, ...]:
    """Sizes to compute with, at most half apart: 1, 2, 3, 4, 6, 8, 12 and so on, and `most`."""
    powers = [2**power for power in range(most.bit_length())]
    sizes = {most, *powers, *(3 * power for power in powers)}
    return tuple(sorted(size for size in sizes if size <= most))


def text_lengths(n_ctx: int) -> tuple[int, ...]:
    """Numbers of tokens to read, up to the context's."""
    return (*(length for length in LENGTHS if length < n_ctx), n_ctx)


def fitting(buckets: Sequence[int], number: int) -> int:
    """The smallest of the ascending `buckets` that holds `number`."""
    return next(bucket for bucket in buckets if bucket >= number)


class Recorder:
    """Captures graphs, all on one stream: libraries keep work space for each that they meet.

    They share their memory too: the next replay of any may overwrite what one has returned.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Out]) -> tuple[torch.cuda.CUDAGraph, Out]:
        """The graph of what `function` does on the device, and where it leaves its result.

        Raises:
            RuntimeError: if the device refuses.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()  # libraries choose kernels, and take their work space, on first use
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device, if only to ask how much memory is free.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = function()
        return graph, out


class Program(Generic[Out]):
    """A function of static tensors; once captured, a graph's replay in its place."""

    def __init__(self, function: Callable[[], Out]) -> None:
        self._function = function
        self._captured: tuple[torch.cuda.CUDAGraph, Out] | None = None
        self.ms = 0.0  # that a replay takes; 0 until captured

    def __call__(self) -> Out:
        """What it returns holds until the next call of any program."""
        if self._captured is not None:
            graph, out = self._captured
            graph.replay()
            return out
        with sdpa_kernel(BACKENDS):
            return self._function()

    def capture(self, recorder: Recorder) -> None:
        """Captures and times it; raises as `Recorder.record`."""
        self._captured = recorder.record(self)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self()
        begin.record()
        self()
        end.record()
        end.synchronize()
        self.ms = begin.elapsed_time(end)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step of a batch gave."""

    logits: Tensor  # [size, vocab] float32
    tokens: Tensor  # [2, size], as `draw` gives them


class Batch:
    """`size` texts that grow by a token each step: the token drawn is the next step's input."""

    def __init__(self, model: GPT2, cache: CellCache, size: int, attend: BatchAttendFn | None = None) -> None:
        """
        Args:
            attend: reads a text as far as it goes, so that one program does for all lengths.
        """
        self.size = size
        self._model, self._cache, self._attend = model, cache, attend
        device = cache.layers.device
        scrap = cache.plan.scrap
        # Never moves, reads and writes the scrap cell alone, and draws the likeliest token.
        padding = [0, 0, 0, scrap, 0, 0, 0, 0, 1, 2, *[0.5] * MAX_GROUP]
        self.padding = tuple(float(number) for number in padding)
        # One table, float64 so that a whole number fits as well: one upload for each step.
        self._empty = torch.tensor(self.padding, dtype=torch.float64, device=device)[:, None]
        self.table = self._empty.repeat(1, size)  # [TABLE_ROWS, size]
        n_ctx = cache.plan.n_ctx
        lengths = text_lengths(n_ctx) if attend is None else (n_ctx,)
        self.programs = {length: Program(partial(self._step, length)) for length in lengths}

    def capture(self, recorder: Recorder) -> None:
        """Captures all programs, each timed with texts of full length; spoils entry 0."""
        for length, program in self.programs.items():
            self.table[SUFFIX] = 0
            self.table[POSITION] = length - 1
            program.capture(recorder)
        self.table.copy_(self._empty)

    def _step(self, length: int) -> Drawn:
        """A step of texts of at most `length` tokens, the new one included."""
        whole = self.table[:TEMPERATURE].long()
        attend = self._attention(whole, length)
        ids, position, at = whole[ID], whole[POSITION], whole[AT]
        logits = self._model.logits(self._model.hidden(ids, position, attend))
        uniforms = self.table[UNIFORMS:].gather(0, at[None])
        tokens = draw(logits, self.table[TEMPERATURE:UNIFORMS], uniforms)
        self.table[ID] = tokens[0]
        self.table[POSITION:TEMPERATURE] += self.table[MOVES]
        return Drawn(logits, tokens)

    def _attention(self, whole: Tensor, length: int) -> AttendFn:
        own = self._attend
        if own is not None:
            return lambda layer, qkv: own(qkv, self._cache.layers[layer], whole)
        start, entry, suffix = whole[START : SUFFIX + 1, :, None]
        position = whole[POSITION, :, None]
        place = torch.arange(length, device=whole.device)
        is_seen = place <= position
        cells = place + torch.where(place < start, entry, suffix)
        cells = torch.where(is_seen, cells, self._cache.plan.scrap)
        writes = (suffix + position)[:, 0]
        return _attention(self._cache, writes, cells, is_seen[:, None, None], 1)


class PrefillProgram:
    """Up to `size` consecutive tokens of one prompt, after what its entry holds of it."""

    def __init__(self, model: GPT2, cache: CellCache, size: int) -> None:
        self.size = size
        self._model, self._cache = model, cache
        # Token ids, positions, cells; then the entry's first cell, and which token is the last.
        self.table = torch.zeros(4, size, dtype=torch.long, device=cache.layers.device)
        self.table[2] = cache.plan.scrap
        n_ctx = cache.plan.n_ctx
        lengths = [length for length in text_lengths(n_ctx) if length >= size] or [n_ctx]
        self.programs = {length: Program(partial(self._compute, length)) for length in lengths}

    def capture(self, recorder: Recorder) -> None:
        """Captures all programs."""
        for program in self.programs.values():
            program.capture(recorder)

    def numbers(self, tokens: Sequence[int], start: int, entry: int) -> list[list[int]]:
        """The table for `tokens`, to be computed into `entry` from position `start` on."""
        spare = self.size - len(tokens)
        first = self._cache.plan.entry(entry)
        positions = range(start, start + len(tokens))
        return [
            [*tokens, *[0] * spare],
            [*positions, *[0] * spare],
            [*(first + position for position in positions), *[self._cache.plan.scrap] * spare],
            [first, len(tokens) - 1, *[0] * (self.size - 2)],
        ]

    def _compute(self, length: int) -> tuple[Tensor, Tensor]:
        """Hidden states [size, n_embd], and the logits [1, vocab] after the last token."""
        ids, positions, cells, rest = self.table.unbind(0)
        place = torch.arange(length, device=ids.device)
        is_seen = (place <= positions[:, None])[None, None]
        attend = _attention(self._cache, cells, (rest[:1] + place)[None], is_seen, self.size)
        hidden = self._model.hidden(ids, positions, attend)
        return hidden, self._model.logits(hidden.index_select(0, rest[1:2]))


def _attention(cache: CellCache, writes: Tensor, reads: Tensor, is_seen: Tensor, num_queries: int) -> AttendFn:
    """Attention of texts with `num_queries` new tokens each.

    Args:
        writes: [texts · queries] cells of the new tokens.
        reads: [texts, length] cells of the texts.
        is_seen: [texts, 1, queries, length] which of them a token may see.
    """
    bias = torch.zeros(is_seen.shape, dtype=cache.layers.dtype, device=is_seen.device)
    bias.masked_fill_(~is_seen, float("-inf"))

    def attend(layer: int, qkv: Tensor) -> Tensor:
        split = qkv.view(len(qkv), 3, *cache.layers.shape[-2:])
        cache.write(layer, writes, split[:, 1:])
        keys, values = cache.read(layer, reads)
        query = split[:, 0].view(len(reads), num_queries, *split.shape[2:]).transpose(1, 2)
        # The queries are scaled already.
        mean = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=1.0)
        return mean.transpose(1, 2).reshape(len(qkv), -1)

    return attend


class FirstDraws:
    """`size` tokens drawn from logits that are put here: those after prompts."""

    def __init__(self, logits: Tensor) -> None:
        """
        Args:
            logits: [size, vocab] float32, where to put them.
        """
        self.size = len(logits)
        self.logits = logits
        self.padding = (0.0, 1.0, 2.0, 0.5)
        self.table = torch.zeros(4, self.size, dtype=torch.float64, device=logits.device)
        self.program = Program(lambda: draw(self.logits, self.table[:3], self.table[3:]))


def draw(logits: Tensor, limits: Tensor, uniforms: Tensor) -> Tensor:
    """Draws that need at most NUM_CANDIDATES candidates; the tokens are those of `sample`.

    Args:
        logits: [rows, vocab] float32.
        limits: [3, rows] float64, as `sampling.limits`, but a temperature of 0 is greedy.
        uniforms: [1, rows] float64.

    Returns:
        [2, rows] float64: token ids, and their log-probabilities under the model's distribution.
    """
    values, ids = logits.topk(min(NUM_CANDIDATES, logits.shape[1]))
    is_greedy = limits[0] == 0
    temperature = torch.where(is_greedy, 1.0, limits[0])
    sampled = pick(values, ids, torch.cat((temperature[None], limits[1:], uniforms)))
    token_ids = torch.where(is_greedy, first_of_equals(values, ids), sampled)
    chosen = logits.gather(1, token_ids[:, None])[:, 0] - torch.logsumexp(logits, -1)
    return torch.stack((token_ids.double(), chosen.double()))
