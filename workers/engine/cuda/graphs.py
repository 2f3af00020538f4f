"""Decode steps, prefill and first tokens as CUDA graphs: functions of tensors whose memory never moves.

What changes from step to step is in a small table on the device, which the host writes and never reads. There is a
graph for each batch bucket and length bucket; rows that a batch does not fill are padding, which reads and writes the
dummy KV slot. Knows the model, the KV slots and sampling. Does not know the scheduler and sequences.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from workers.engine.cuda.forward import AttendFn, DecodeKernels, decode, prefill
from workers.engine.cuda.kv_cache import KVCache
from workers.engine.cuda.step_kernels import MAX_STEPS, POSITION, SUFFIX, TABLE_ROWS, Attention, StepKernels
from workers.engine.model.transformer import Transformer

# Without cuDNN, whose attention is compiled for each new shape, while a request waits.
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
TIMED_TOKENS = 128  # of each sequence, when a program is timed; real durations follow
SHORTEST = 64  # bucket of tokens attended to
SEGMENT_TOKENS, NUM_SEGMENTS = 16, 8  # of a prefill program
NUM_TOKENS = SEGMENT_TOKENS * NUM_SEGMENTS

Out = TypeVar("Out")


def batch_sizes(most: int) -> tuple[int, ...]:
    """Batch buckets up to `most`, each at most twice the one before: 1, 2, 3, 4, 6, 8, 12, …, and `most`."""
    powers = [2**power for power in range(most.bit_length())]
    sizes = {most, *powers, *(3 * power for power in powers)}
    return tuple(sorted(size for size in sizes if size <= most))


def length_buckets(n_ctx: int) -> tuple[int, ...]:
    """Numbers of tokens to attend to, up to the context's."""
    doublings = (n_ctx // SHORTEST).bit_length()
    return (*(length for length in (SHORTEST << power for power in range(doublings)) if length < n_ctx), n_ctx)


def bucket_for(buckets: Sequence[int], number: int) -> int:
    """The smallest of the ascending `buckets` that holds `number`."""
    return next(bucket for bucket in buckets if bucket >= number)


class GraphRecorder:
    """Captures CUDA graphs on one stream, as libraries keep a workspace for each stream that they see.

    The graphs share a memory pool: a replay may overwrite the result of any other graph.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Out]) -> tuple[torch.cuda.CUDAGraph, Out]:
        """The graph of `function`, and the tensors that hold its result after a replay.

        Raises:
            RuntimeError: if the function cannot be captured.
        """
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            function()  # libraries choose kernels and allocate workspaces on first use
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # a graph that it destroys, of an earlier try to load the model, would invalidate the capture
        try:
            # Other threads may call CUDA meanwhile, for example to read the free memory.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                out = function()
        finally:
            gc.enable()
            # `torch.cuda.graph` does not, if the capture was invalidated.
            torch.cuda.set_stream(before)
        return graph, out


class Program(Generic[Out]):
    """A function of static tensors; after `capture`, a call replays its CUDA graph."""

    def __init__(self, function: Callable[[], Out]) -> None:
        self._function = function
        self._captured: tuple[torch.cuda.CUDAGraph, Out] | None = None
        self.ms = 0.0  # of a replay, as measured lately; 0 until captured

    def __call__(self) -> Out:
        """Runs the function. The result is valid until the next call of any program."""
        if self._captured is not None:
            graph, out = self._captured
            graph.replay()
            return out
        return self._function()

    def capture(self, recorder: GraphRecorder) -> None:
        """Captures the function and times a replay; raises as `GraphRecorder.record`."""
        self._captured = recorder.record(self)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self()
        begin.record()
        self()
        end.record()
        end.synchronize()
        self.ms = begin.elapsed_time(end)


class Batch:
    """The decode step of `size` sequences. The token drawn is the input of the next step, without the host.

    Attributes:
        table: [TABLE_ROWS, size] float64.
        tokens: [MAX_STEPS, 4, size] float64, the tokens of the steps since the table's AT was 0, as
            `StepKernels.draw` stores them.
        programs: length bucket → the step; its result is the logits [size, vocab] float32.
    """

    def __init__(self, model: Transformer, cache: KVCache, size: int, kernels: DecodeKernels) -> None:
        self.size = size
        self.padding = padding_column(cache.layout.dummy_slot)
        # One table, so one upload for each launch; float64 holds the integers exactly.
        self._empty = torch.tensor(self.padding, dtype=torch.float64, device=cache.layers.device)[:, None]
        self.table = self._empty.repeat(1, size)
        self.tokens = torch.zeros(MAX_STEPS, 4, size, dtype=torch.float64, device=cache.layers.device)
        n_ctx = cache.layout.n_ctx
        lengths = length_buckets(n_ctx) if kernels.is_length_bound else (n_ctx,)
        step = partial(decode, model, cache.layers, self.table, self.tokens)
        self.programs = {length: Program(partial(step, kernels.make(length))) for length in lengths}

    def capture(self, recorder: GraphRecorder) -> None:
        """Captures all programs, each timed at TIMED_TOKENS. Overwrites entry 0."""
        for length, program in self.programs.items():
            self.table[SUFFIX] = 0
            self.table[POSITION] = min(length, TIMED_TOKENS) - 1
            program.capture(recorder)
        self.table.copy_(self._empty)


def padding_column(dummy_slot: int) -> tuple[float, ...]:
    """A table's column that never advances, reads and writes the dummy slot only, and draws greedily."""
    return (0, 0, 0, dummy_slot, 0, 0, 0, 1, 2, 0.5, 1, 0, *[0.5] * MAX_STEPS)


@dataclass(frozen=True, slots=True)
class Segment:
    """Up to SEGMENT_TOKENS consecutive tokens of a prompt, from position `start` on, to be stored in `entry`."""

    tokens: Sequence[int]
    start: int
    entry: int

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class PrefillProgram:
    """The prefill of up to NUM_SEGMENTS segments, of one prompt or of several.

    All products have the same number of rows whatever is prefilled, so a token's keys, values and logits do not depend
    on what shares the program with it, nor on how its prompt is divided. Segments of a prompt may share a program: the
    keys and values of all segments are stored in a layer before any attends.

    Attributes:
        table: [4, NUM_TOKENS] int64, as `numbers` gives it.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        # Rows: token ids, positions, slots; then the first slot of each segment's entry, and its last row.
        self.table = torch.zeros(4, NUM_TOKENS, dtype=torch.long, device=cache.layers.device)
        self.table[2] = cache.layout.dummy_slot
        lengths = length_buckets(cache.layout.n_ctx)
        self._programs = {length: Program(partial(self._compute, length)) for length in lengths}

    def capture(self, recorder: GraphRecorder) -> None:
        """Captures the programs of all lengths."""
        for program in self._programs.values():
            program.capture(recorder)

    def __call__(self, length: int) -> tuple[Tensor, Tensor]:
        """Computes the segments in `table`, of which none stops behind position `length`.

        Returns:
            Residual stream after the last layer, [NUM_SEGMENTS, SEGMENT_TOKENS, n_embd], and logits after the last
            token of each segment, [NUM_SEGMENTS, vocab] float32. Both are valid until the next call of any program.
        """
        return self._programs[bucket_for(tuple(self._programs), length)]()

    def numbers(self, segments: Sequence[Segment]) -> list[list[int]]:
        """The table [4, NUM_TOKENS] of these segments."""
        layout = self._cache.layout
        ids, positions = [0] * NUM_TOKENS, [0] * NUM_TOKENS
        slots, rest = [layout.dummy_slot] * NUM_TOKENS, [0] * NUM_TOKENS
        for number, segment in enumerate(segments):
            row, first = number * SEGMENT_TOKENS, layout.first_of_entry(segment.entry)
            rows = slice(row, row + len(segment.tokens))
            ids[rows] = segment.tokens
            positions[rows] = range(segment.start, segment.stop)
            slots[rows] = range(first + segment.start, first + segment.stop)
            rest[number], rest[NUM_SEGMENTS + number] = first, rows.stop - 1
        return [ids, positions, slots, rest]

    def _compute(self, length: int) -> tuple[Tensor, Tensor]:
        ids, positions, slots, rest = self.table.unbind(0)
        place = torch.arange(length, device=ids.device)
        is_seen = (place <= positions[:, None]).view(NUM_SEGMENTS, 1, SEGMENT_TOKENS, length)
        reads = rest[:NUM_SEGMENTS, None] + place
        with sdpa_kernel(BACKENDS):
            hidden = prefill(self._model, ids, positions, _attention(self._cache, positions, slots, reads, is_seen))
        last = hidden.index_select(0, rest[NUM_SEGMENTS : 2 * NUM_SEGMENTS])
        return hidden.view(NUM_SEGMENTS, SEGMENT_TOKENS, -1), self._model.logits(last)


def _attention(cache: KVCache, positions: Tensor, writes: Tensor, reads: Tensor, is_seen: Tensor) -> AttendFn:
    """Attention of segments, in plain torch.

    Args:
        positions: [segments · queries] positions of the new tokens.
        writes: [segments · queries] KV slots of the new tokens.
        reads: [segments, length] KV slots of all tokens.
        is_seen: [segments, 1, queries, length] which of them each new token attends to.
    """
    bias = torch.zeros(is_seen.shape, dtype=cache.layers.dtype, device=is_seen.device)
    bias.masked_fill_(~is_seen, float("-inf"))

    def attend(layer: int, attention: Attention, qkv: Tensor) -> Tensor:
        queries, keys_values = attention.split(qkv, cache.layers, positions)
        cache.write(layer, writes, keys_values)
        keys, values = cache.read(layer, reads)
        queries = queries.view(len(reads), -1, *queries.shape[1:]).transpose(1, 2)
        # The model scales its queries.
        mean = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, scale=1.0, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        return mean.transpose(1, 2).reshape(len(qkv), -1)

    return attend


class FirstTokens:
    """Draws the first token of `size` sequences from the logits after their prompts."""

    def __init__(self, logits: Tensor, kernels: StepKernels) -> None:
        """
        Args:
            logits: [size, vocab] float32, to be filled before the program runs; its rows may be padded.
        """
        self.size = len(logits)
        self.logits = logits
        self.padding = padding_column(0)
        self.table = torch.zeros(TABLE_ROWS, self.size, dtype=torch.float64, device=logits.device)
        self.tokens = torch.zeros(1, 4, self.size, dtype=torch.float64, device=logits.device)
        self.program = Program(lambda: kernels.draw(self.logits, self.table, self.tokens))
