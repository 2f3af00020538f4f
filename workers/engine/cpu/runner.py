"""The device's side of a step: a plan in, tokens out.

Knows the model, the cache and the kernels. Refuses to know why it is this plan and no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.engine.cpu.kv_cache import VECTOR, CacheShape, KVCache
from workers.engine.cpu.linear import CpuLinear, Int8Product, Linear, PackedInt8Linear
from workers.engine.cpu.sampler import CpuSampler, is_usual
from workers.engine.interrupt import Interrupt
from workers.engine.memory import cache_budget_bytes
from workers.engine.model.gpt2 import GPT2, MAX_HEAD_ROWS
from workers.engine.model.loader import LoadedModel
from workers.engine.request import GeneratedToken
from workers.engine.runner import MAX_MULTI_STEP_S, RunnerOutput, draw_all, draw_of, multi_step_budget_s, num_left
from workers.engine.sampling import Draw, uniform
from workers.engine.scheduler import MAX_CHUNK
from workers.engine.scheduler_output import BatchRow, SchedulerOutput
from workers.engine.sequence import Sequence

log = logging.getLogger(__name__)

# Numbers that a kernel goes through from which on it pays to wake the other threads, measured on two cores; and within
# a program, where they are awake.
LARGE = 16_384
LARGE_IN_PROGRAM = 1_000
# While sequences go on, their next steps are computed in one call, until somebody rings: so many, or those of so long,
# for the watchdog counts calls.
MAX_AHEAD = 16
# Whether a kernel of a program is shared among them: by the numbers that all rows have in the stream, inside a layer,
# or to look back at.
_NEVER, _ALWAYS, _BY_WIDTH, _BY_INNER, _BY_LENGTH = range(5)


class CpuRunner:
    """Runs a model on the CPU, from one thread."""

    def __init__(self, loaded: LoadedModel, max_sequences: int, interrupt: Interrupt) -> None:
        """
        Args:
            max_sequences: sequences that can run at once.
            interrupt: rings when the next steps are not to be computed ahead.

        Raises:
            MemoryError: if the free memory is too small for their keys and values.
        """
        config = loaded.config
        # Half as many bytes to read at each step; in fp32, tokens are those of Hugging Face's fp32.
        dtype = torch.float32 if loaded.dtype == "fp32" else torch.float16
        shape = CacheShape(config.n_layer, config.n_head, config.head_size, config.n_positions, dtype)
        self.num_entries = shape.num_entries(cache_budget_bytes(), max_sequences)
        cache = KVCache(shape, self.num_entries, max_sequences)
        log.info(
            "cache: %d prompts of %d tokens and %d suffixes, %d MiB at most",
            *(self.num_entries, config.n_positions, max_sequences, cache.num_bytes >> 20),
        )
        self._cache = cache
        self._pass = _ForwardPass(loaded.model, shape, cache, max_sequences + MAX_CHUNK, interrupt)
        self._kept_logits: dict[int, Tensor] = {}  # entry → [1 + drafted, vocab], up to the end of its prompt
        self._step_s: dict[int, float] = {}  # by number of rows, the newest

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput) -> RunnerOutput:
        """Carries out a plan."""
        for copy in plan.copies:
            self._cache.copy(copy)
        output = None if plan.chunks or plan.ready else self._go_ahead(plan)
        return output or self._compute(plan)

    def _go_ahead(self, plan: SchedulerOutput) -> RunnerOutput | None:
        """The next token of each row, and perhaps those that follow; None where a kernel cannot draw them."""
        rows = plan.rows
        sequences = [row.sequence for row in rows]
        draws = [draw_of(sequence) for sequence in sequences]
        if len(rows) > self._pass.most_rows_ahead or not all(
            draw.constraint is None and is_usual(draw) for draw in draws
        ):
            return None
        step_s = self._step_s.get(len(rows), MAX_MULTI_STEP_S)
        start = time.monotonic()
        left_s = min(multi_step_budget_s(one, start) for one in sequences) if plan.allows_multi_step else 0.0
        number = max(1, min(*map(num_left, rows), MAX_AHEAD, int(left_s / step_s)))
        steps = self._pass.steps(rows, draws, number)
        self._step_s[len(rows)] = (time.monotonic() - start) / len(steps)
        return RunnerOutput([pair for step in steps for pair in zip(sequences, step, strict=True)], [], len(steps))

    def _compute(self, plan: SchedulerOutput) -> RunnerOutput:
        wanted, sources, echoed = _wanted(plan)
        logits = self._pass.logits(plan, wanted)
        pieces = [logits]
        num_rows = len(wanted)
        for row in plan.ready:
            kept = self._kept_logits[row.entry.index]
            sources.append(num_rows + len(kept) - 1 - len(row.sequence.forced_ids))
            pieces.append(kept)
            num_rows += len(kept)
        # Only now: a prompt that is complete may be in the entry of one that was ready.
        first = len(plan.rows)
        for chunk in plan.chunks:
            first += chunk.stop - chunk.start
            if chunk.is_last:
                number = wanted.index(first - 1)
                self._kept_logits[chunk.entry.index] = logits[number - chunk.prompt.num_forced_ids : number + 1].clone()
        if len(pieces) > 1:
            logits = torch.cat(pieces)
        sample = partial(self._pass.sampler.sample, logits)
        return RunnerOutput(draw_all(plan.draws, sources, sample), self._echoes(plan, logits, echoed))

    def _echoes(self, plan: SchedulerOutput, logits: Tensor, echoed: Items[int]) -> list[tuple[Sequence, list[float]]]:
        echoes: list[tuple[Sequence, list[float]]] = []
        for first, chunk in zip(echoed, (chunk for chunk in plan.chunks if chunk.prompt.is_echoed), strict=True):
            following = chunk.prompt.tokens[chunk.start + 1 : chunk.stop + 1]
            rows = range(first, first + len(following))
            if not following:
                continue
            logprobs = self._pass.sampler.score(logits, rows, following)
            echoes += [(member, logprobs) for member in chunk.prompt.members]
        return echoes


def _wanted(plan: SchedulerOutput) -> tuple[list[int], list[int], list[int]]:
    """Which of the step's rows need logits; of each draw, but the ready, where among those its logits are; and of each
    chunk that is echoed, where its first row's are."""
    wanted = list(range(len(plan.rows)))
    sources = list(wanted)
    echoed = []
    first = len(plan.rows)
    for chunk in plan.chunks:
        last = first + chunk.stop - chunk.start
        if chunk.prompt.is_echoed:
            echoed.append(len(wanted))
            wanted += range(first, last)
        elif chunk.is_last:
            wanted += range(last - 1 - chunk.prompt.num_forced_ids, last)
        if chunk.is_last:
            sources += [len(wanted) - 1 - chunk.prompt.num_forced_ids] * len(chunk.drawing)
        first = last
    return wanted, sources, echoed


class _ForwardPass:
    """A step's arithmetic: matrix products of few rows and all between products by our kernels, the others by torch."""

    def __init__(self, model: GPT2, shape: CacheShape, cache: KVCache, max_rows: int, interrupt: Interrupt) -> None:
        # Not before it is needed: the first import on a machine compiles, for some seconds.
        from workers.engine.cpu import kernels as cpu_kernels

        self._k = k = cpu_kernels
        config = model.config
        self._model = model
        self._kernels = k.Kernels(torch.get_num_threads())
        width, inner = config.n_embd, config.n_inner
        num_padded = 2 * max_rows  # more than any row count rounds up to
        self._x = torch.zeros(max_rows, width)
        self._prepared = torch.zeros(num_padded * max(width, inner))
        self._scales = torch.zeros(max_rows, 1)
        self._rows = np.zeros((max_rows, k.ROW_FIELDS), np.int64)
        self._tiles = np.zeros((max_rows, 1 + k.TILE), np.int64)
        self._query, self._mean = torch.zeros(max_rows, width), torch.zeros(max_rows, width)
        heads_done = np.zeros(max_rows, np.int64)
        score_stride = shape.entry_positions + shape.suffix_positions + 2 * VECTOR
        scratch_stride = max(k.TILE * (shape.head_size + shape.value_width + k.TOTALS + score_stride), k.LANES + width)
        scratch = np.zeros((self._kernels.num_threads, scratch_stride), np.float32)
        epsilon = np.array([config.layer_norm_epsilon], np.float32)
        step = self._step = np.zeros(k.STEP_FIELDS, np.int64)
        step[k.WIDTH], step[k.INNER] = width, inner
        step[k.HEADS], step[k.HEAD_SIZE] = config.n_head, config.head_size
        step[k.ACTIVATION] = k.ACTIVATIONS[config.activation_function]
        step[k.EPSILON] = _address(epsilon)
        step[k.END_ID] = -1 if config.eos_token_id is None else config.eos_token_id
        step[k.TOKEN_EMBEDDING] = _address(model.token_embedding)
        step[k.POSITION_EMBEDDING] = _address(model.position_embedding)
        step[k.X], step[k.PREPARED], step[k.SCALES] = map(_address, (self._x, self._prepared, self._scales))
        step[k.SCALES_IN] = step[k.SCALES]
        step[k.QUERY], step[k.MEAN] = _address(self._query), _address(self._mean)
        step[k.ROWS], step[k.TILES], step[k.HEADS_DONE] = map(_address, (self._rows, self._tiles, heads_done))
        step[k.SCRATCH], step[k.SCRATCH_STRIDE], step[k.SCORE_STRIDE] = _address(scratch), scratch_stride, score_stride
        item = step[k.ITEM_BYTES] = shape.dtype.itemsize
        step[k.ENTRY_KEYS], step[k.ENTRY_VALUES] = (
            cache.entries.keys.stride(1) * item,
            cache.entries.values.stride(1) * item,
        )
        step[k.SUFFIX_KEYS], step[k.SUFFIX_VALUES] = (
            cache.suffixes.keys.stride(1) * item,
            cache.suffixes.values.stride(1) * item,
        )
        self.sampler = CpuSampler(self._kernels, config.vocab_size)

        layers = []
        norms = []
        bias_in: Tensor | None = None
        for index, layer in enumerate(model.layers):
            qkv, out, up, down = map(_cpu, (layer.qkv, layer.out, layer.up, layer.down))
            parameters = np.zeros(k.LAYER_FIELDS, np.int64)
            parameters[k.QKV_BIAS], parameters[k.UP_BIAS] = _address(qkv.bias), _address(up.bias)
            parameters[k.KEYS] = _address(cache.entries.keys[index])
            parameters[k.VALUES] = _address(cache.entries.values[index])
            parameters[k.SUFFIXES_KEYS] = _address(cache.suffixes.keys[index])
            parameters[k.SUFFIXES_VALUES] = _address(cache.suffixes.values[index])
            norms.append(_norm_parameters(k, bias_in, layer.norm_1.weight, layer.norm_1.bias))
            norms.append(_norm_parameters(k, out.bias, layer.norm_2.weight, layer.norm_2.bias))
            layers.append((parameters, qkv, out, up, down))
            bias_in = down.bias
        norms.append(_norm_parameters(k, bias_in, model.norm.weight, model.norm.bias))
        self._layers = layers
        # Addresses are all that the kernels know: what they point to is kept alive here.
        self._norms, self._keep = norms, (heads_done, scratch, epsilon)
        self._norm_addresses = [_address(norm) for norm in norms]
        self._layer_addresses = [_address(parameters) for parameters, *_ in layers]
        self._step_address = _address(step)
        self._most_program_rows = self.most_rows_ahead = 0
        products = [linear.product for _, *linears in layers for linear in linears]
        own = [product for product in products if isinstance(product, Int8Product) and product.own is not None]
        if len(own) == len(products):
            self._most_program_rows = max_rows
            self._make_program(interrupt)

    def _make_program(self, interrupt: Interrupt) -> None:
        """All layers, and the head of the rows whose logits are wanted, in one call."""
        k, at = self._k, self._step_address
        width, inner = self._model.config.n_embd, self._model.config.n_inner
        self._y = torch.zeros(self._most_program_rows, width)
        self._wide_y = torch.zeros(self._most_program_rows, max(3 * width, inner))
        narrow, wide, prepared = map(_address, (self._y, self._wide_y, self._prepared))
        entries: list[tuple[Any, int, int, int]] = []
        sizes: list[int] = []
        own: list[PackedInt8Linear] = []

        def add(kernel: Any, size: int, step: int, layer: int, product: int) -> None:
            entries.append((kernel, step, layer, product))
            sizes.append(size)

        def multiply(linear: Linear, y: int) -> None:
            product = _cpu(linear).product
            assert isinstance(product, Int8Product)
            assert product.own is not None
            own.append(product.own)
            add(k.multiply, _ALWAYS if product.own.is_large else _NEVER, product.own.address, prepared, y)

        for index, (_, qkv, out, up, down) in enumerate(self._layers):
            layer = self._layer_addresses[index]
            add(k.add_and_norm, _BY_WIDTH, at, self._norm_addresses[2 * index], narrow if index > 0 else 0)
            multiply(qkv, wide)
            add(k.store, _BY_WIDTH, at, layer, wide)
            add(k.attend, _BY_LENGTH, at, layer, 0)
            multiply(out, narrow)
            add(k.add_and_norm, _BY_WIDTH, at, self._norm_addresses[2 * index + 1], narrow)
            multiply(up, wide)
            add(k.act, _BY_INNER, at, layer, wide)
            multiply(down, narrow)
        self._num_layer_entries = len(entries)
        head = _cpu(self._model.head).product
        self._most_head_rows = 0
        self._num_step_entries = self._num_layer_entries  # layers and head
        if isinstance(head, Int8Product) and head.own is not None:
            self._most_head_rows = min(self._most_program_rows, MAX_HEAD_ROWS)
            vocab = self._model.config.vocab_size
            self._logits = torch.zeros(self._most_head_rows, vocab)
            self._sources = np.zeros(self._most_head_rows, np.int64)
            self._head_scales = torch.zeros(self._most_head_rows, 1)
            self._head_step = self._step.copy()
            self._head_step[k.SOURCES], self._head_step[k.SCALES] = map(_address, (self._sources, self._head_scales))
            self._head_step[k.MODE] = k.UINT8
            logits, of_head = _address(self._logits), _address(self._head_step)
            add(k.add_and_norm, _BY_WIDTH, of_head, self._norm_addresses[-1], narrow)
            multiply(self._model.head, logits)
            add(k.scale, _ALWAYS if vocab > LARGE else _NEVER, of_head, vocab, logits)
            self._num_step_entries = len(entries)
            self.most_rows_ahead = self._most_head_rows
            add(k.sample, _ALWAYS, self.sampler.address, 0, logits)
            add(k.advance, _NEVER, at, interrupt.address, self.sampler.address)
        for one, following in pairwise([*own, own[0]]):
            one.precede(following)
        self._program, self._program_sizes = k.Program(self._kernels, entries, interrupt), np.array(sizes)

    def steps(self, rows: Items[BatchRow], draws: Items[Draw], number: int) -> list[list[GeneratedToken]]:
        """`number` steps of `rows`, at most `most_rows_ahead`, each with the token that the one before it has drawn.

        They are fewer if the interrupt rings.

        Args:
            draws: of the first step; the kernel can draw them.
        """
        k = self._k
        num_rows = self._describe(SchedulerOutput([], list(rows), [], []))
        tables = np.zeros((number, num_rows, k.DRAW_FIELDS))
        for column, draw in enumerate(draws):
            tables[:, column] = self.sampler.describe(draw, column)
            tables[1:, column, k.UNIFORM] = [uniform(draw.seed, draw.position + ahead) for ahead in range(1, number)]
        tables[1:, :, k.RANK] = 0  # it is the first token's
        self.sampler.use(tables[0])
        done = self._run_program(num_rows, len(self._program_sizes), range(num_rows), number)
        return [
            [GeneratedToken(int(row[k.TOKEN]), row[k.LOGPROB]) for row in table] for table in tables[:done].tolist()
        ]

    def logits(self, plan: SchedulerOutput, wanted: Items[int]) -> Tensor:
        """Logits [wanted, vocab] float32 of some of the plan's rows; stores all their keys and values."""
        k, step, width = self._k, self._step, self._model.config.n_embd
        num_rows = self._describe(plan)
        if num_rows == 0:
            return torch.empty(0, self._model.config.vocab_size)
        if num_rows <= self._most_program_rows:
            if not 0 < len(wanted) <= self._most_head_rows:
                self._run_program(num_rows, self._num_layer_entries)
                return self._head(self._y[:num_rows], num_rows, wanted)
            self._run_program(num_rows, self._num_step_entries, wanted)
            # The next step writes there: who keeps logits copies them.
            return self._logits[: len(wanted)]
        run, at = self._kernels.run, self._step_address
        is_large, is_wide, is_long = self._sizes(num_rows, LARGE)
        _, qkv, out, up, down = self._layers[0]  # other layers' have the same shapes
        padded = [linear.padded(num_rows) for linear in (qkv, out, up, down)]
        modes = [linear.mode(number) for linear, number in zip((qkv, out, up, down), padded, strict=True)]
        inputs = [
            self._input(mode, number, columns)
            for mode, number, columns in zip(
                modes, padded, (width, width, width, self._model.config.n_inner), strict=True
            )
        ]
        y: Tensor | None = None
        for index, (_, qkv, out, up, down) in enumerate(self._layers):
            layer = self._layer_addresses[index]
            step[k.MODE] = modes[0]
            product = 0 if y is None else y.data_ptr()
            run(k.add_and_norm, at, self._norm_addresses[2 * index], product, is_large)
            y = qkv.multiply(inputs[0])
            run(k.store, at, layer, y.data_ptr(), is_large)
            step[k.MODE] = modes[1]
            run(k.attend, at, layer, 0, is_long)
            y = out.multiply(inputs[1])
            step[k.MODE] = modes[2]
            run(k.add_and_norm, at, self._norm_addresses[2 * index + 1], y.data_ptr(), is_large)
            y = up.multiply(inputs[2])
            step[k.MODE] = modes[3]
            run(k.act, at, layer, y.data_ptr(), is_wide)
            y = down.multiply(inputs[3])
        assert y is not None
        return self._head(y, num_rows, wanted)

    def _run_program(self, num_rows: int, num_entries: int, wanted: Items[int] = (), num_times: int = 1) -> int:
        """The program's first entries, for the rows that are described, and the head of those `wanted`; how often."""
        k = self._k
        self._step[k.MODE] = k.UINT8
        is_large = np.array((False, True, *self._sizes(num_rows, LARGE_IN_PROGRAM)))[self._program_sizes]
        of_each = np.full(num_entries, num_rows)
        if wanted:
            self._sources[: len(wanted)] = wanted
            self._head_step[k.NUM_ROWS] = of_each[self._num_layer_entries :] = len(wanted)
        number: int = self._program.run(of_each, num_entries, is_large, num_times=num_times)
        return number

    def _sizes(self, num_rows: int, least: int) -> tuple[bool, bool, bool]:
        """Whether it pays to share a kernel of `_BY_WIDTH`, `_BY_INNER` and `_BY_LENGTH`."""
        config = self._model.config
        return (
            num_rows * config.n_embd > least,
            num_rows * config.n_inner > 2 * least,
            self._attention_size(num_rows) > least,
        )

    def _head(self, y: Tensor, num_rows: int, wanted: Items[int]) -> Tensor:
        """The logits of `wanted`; `y` is the last layer's product."""
        k, step = self._k, self._step
        head = _cpu(self._model.head)
        num_wanted = len(wanted)
        if num_wanted == 0:
            return torch.empty(0, self._model.config.vocab_size)
        if num_wanted < num_rows:
            index = torch.tensor(wanted)
            y = y[index]
            self._x[:num_wanted] = self._x[index]
            self._scales[:num_wanted] = self._scales[index]
            step[k.NUM_ROWS] = num_wanted
        padded = head.padded(num_wanted)
        step[k.MODE] = mode = head.mode(padded)
        is_large = num_wanted * self._model.config.n_embd > LARGE
        norm = self._norm_addresses[-1]
        self._kernels.run(k.add_and_norm, self._step_address, norm, y.data_ptr(), is_large, holds=True)
        logits = head.multiply(self._input(mode, padded, self._model.config.n_embd))[:num_wanted]
        return logits if mode == k.PLAIN else logits.mul_(self._scales[:num_wanted])

    def _describe(self, plan: SchedulerOutput) -> int:
        """Fills in the rows and tiles of a plan; the number of rows."""
        k = self._k
        rows: list[tuple[int, ...]] = []
        by_entry: dict[int, list[int]] = {}
        tiles: list[list[int]] = []
        for number, row in enumerate(plan.rows):
            rows.append(
                (
                    row.sequence.token_ids[-1],
                    row.position,
                    row.entry.index,
                    row.start,
                    row.suffix,
                    row.suffix_length + 1,
                )
            )
            by_entry.setdefault(row.entry.index, []).append(number)
        for numbers in by_entry.values():
            tiles += [numbers[first : first + k.TILE] for first in range(0, len(numbers), k.TILE)]
        for chunk in plan.chunks:
            first = len(rows)
            entry = chunk.entry.index
            rows += [
                (chunk.prompt.tokens[position], position, entry, position + 1, -1, 0)
                for position in range(chunk.start, chunk.stop)
            ]
            tiles += [list(range(at, min(at + k.TILE, len(rows)))) for at in range(first, len(rows), k.TILE)]
        if rows:
            self._rows[: len(rows)] = rows
            padding = [0] * k.TILE
            self._tiles[: len(tiles)] = [[len(tile), *tile, *padding[len(tile) :]] for tile in tiles]
        self._step[k.NUM_ROWS], self._step[k.NUM_TILES] = len(rows), len(tiles)
        return len(rows)

    def _attention_size(self, num_rows: int) -> int:
        """About how many positions and heads are computed."""
        k = self._k
        rows = self._rows[:num_rows]
        seen = int(rows[:, k.ROW_SEEN].sum() + rows[:, k.ROW_SUFFIX_SEEN].sum())
        return seen * self._model.config.n_head

    def _input(self, mode: int, num_rows: int, width: int) -> Tensor:
        """The prepared rows as a product takes them."""
        if mode == self._k.UINT8:
            return self._prepared.view(torch.uint8)[: num_rows * width].view(num_rows, width)
        return self._prepared[: num_rows * width].view(num_rows, width)


def _cpu(linear: Linear) -> CpuLinear:
    assert isinstance(linear, CpuLinear)
    return linear


def _address(array: Any) -> int:
    """Where an array's first element is; 0 of None."""
    if array is None:
        return 0
    assert array.is_contiguous() if isinstance(array, Tensor) else array.flags.c_contiguous
    return int(array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data)


def _norm_parameters(k: Any, bias_in: Tensor | None, weight: Tensor, bias: Tensor) -> Any:
    parameters = np.zeros(k.NORM_FIELDS, np.int64)
    parameters[k.NORM_BIAS_IN], parameters[k.NORM_WEIGHT] = _address(bias_in), _address(weight)
    parameters[k.NORM_BIAS] = _address(bias)
    return parameters
