"""A decode step alone: replays of one CUDA graph, timed by the device's events. Runs in a process of its own.

Every row of the batch has a prompt of its own, so that no row reads keys and values that another row has just read.
The rows do not advance: every replay has the same context. Knows the table of a batch. Does not know requests, prefill
and the scheduler.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

from tests.bench.speed.engine_alone import load
from workers.checkpoints.resolve import Checkpoint
from workers.engine.cuda import step_kernels as rows
from workers.engine.cuda.graphs import Batch, GraphRecorder, bucket_for
from workers.engine.cuda.kernel_choice import Kernels, choose_kernels, make_kernels
from workers.engine.cuda.kv_cache import KVCache


class DecodeSteps:
    """Decode steps of one model. On a device that is no GPU nothing is captured, and a clock of the host is read.

    Attributes:
        loaded: the model.
        kernels: which kernels the steps use, and why, for operators.
    """

    @torch.inference_mode()
    def __init__(
        self, subject: Checkpoint, device: str, dtype: str, max_rows: int, kernels: Kernels | None = None
    ) -> None:
        """
        Args:
            kernels: name of the kernels. None for those that a worker takes on this device.

        Raises:
            MemoryError: not even one context fits, or the suffixes of `max_rows` rows do not.
        """
        self._is_captured = device.startswith("cuda")
        if self._is_captured:
            torch.cuda.set_device(device)
            torch.cuda.empty_cache()  # of an earlier model: the KV cache takes a share of what is free
        self.loaded = load(subject, device, dtype)
        weights_dtype, place = self.loaded.model.token_embedding.dtype, torch.device(device)
        self.kernels = str(kernels)
        if kernels is None:
            choice = choose_kernels(self.loaded.config, weights_dtype, max_rows, place)
            self.kernels, kernels = str(choice), choice.kernels
        self._kernels = make_kernels(kernels, self.loaded.model, max_rows, place)
        self._cache = KVCache(self.loaded.config, max_rows, weights_dtype, place)
        # Random, so that no kernel meets values that are equal everywhere.
        for layer in self._cache.layers:
            layer.normal_()
        self._batches: dict[tuple[int, int], Callable[[], object]] = {}
        self._recorder: GraphRecorder | None = None

    @torch.inference_mode()
    def replay(self, num_rows: int, num_tokens: int) -> Callable[[], object]:
        """A function that replays the step of `num_rows` sequences whose contexts have `num_tokens` tokens, in
        inference mode.

        Raises:
            MemoryError: the contexts, or their suffixes, do not fit in the KV cache.
        """
        layout = self._cache.layout
        if num_rows * num_tokens > layout.num_entries * layout.n_ctx or num_rows > layout.max_sequences:
            raise MemoryError(f"the KV cache has no room for {num_rows} contexts of {num_tokens} tokens")
        if (num_rows, num_tokens) not in self._batches:
            self._batches[num_rows, num_tokens] = self._capture(num_rows, num_tokens)
        return self._batches[num_rows, num_tokens]

    @torch.inference_mode()
    def time(self, num_rows: int, num_tokens: int, warm_up_s: float, num_replays: int) -> list[float]:
        """Milliseconds of `num_replays` replays after a warm-up."""
        return time_replays(self.replay(num_rows, num_tokens), self._is_captured, warm_up_s, num_replays)

    def _capture(self, num_rows: int, num_tokens: int) -> Callable[[], object]:
        batch = Batch(self.loaded.model, self._cache, num_rows, self._kernels)
        program = batch.programs[bucket_for(tuple(batch.programs), num_tokens)]
        self._fill(batch, num_tokens)
        if self._is_captured:
            self._recorder = self._recorder or GraphRecorder()
            program.capture(self._recorder)
            self._fill(batch, num_tokens)  # a capture runs the step
        return program

    def _fill(self, batch: Batch, num_tokens: int) -> None:
        """The table of a batch whose rows each read slots of their own, one context after the other, and write into
        their suffix."""
        layout, table, position = self._cache.layout, batch.table, num_tokens - 1
        for row in range(batch.size):
            table[rows.ID, row] = row + 1
            table[rows.START, row] = position
            table[rows.ENTRY, row] = row * num_tokens
            table[rows.SUFFIX, row] = layout.first_of_suffix(row) - position
        table[rows.MOVES] = 0  # the next replay has the same context
        table[rows.POSITION] = position
        table[rows.TEMPERATURE], table[rows.TOP_K], table[rows.TOP_P] = 1.0, 50, 0.95
        table[rows.POINT], table[rows.WIDTH], table[rows.NEXT_POINTS :] = 0.5, 1.0, 0.5


def time_replays(replay: Callable[[], object], is_cuda: bool, warm_up_s: float, num_replays: int) -> list[float]:
    """Milliseconds of each replay: between two events of the stream, or by the host's clock."""
    end = time.perf_counter() + warm_up_s
    replay()
    while time.perf_counter() < end:
        replay()
        if is_cuda:
            torch.cuda.synchronize()
    if not is_cuda:
        marks = [time.perf_counter()]
        for _ in range(num_replays):
            replay()
            marks.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in itertools.pairwise(marks)]
    # An event between two replays ends one and begins the next: the device never waits for the host.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]  # type: ignore[no-untyped-call]
    for number, event in enumerate(events):
        event.record()
        if number < num_replays:
            replay()
    torch.cuda.synchronize()
    return [begin.elapsed_time(done) for begin, done in itertools.pairwise(events)]
