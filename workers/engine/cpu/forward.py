"""The forward pass on a CPU: compiled kernels, and matrix products by the packed 8-bit kernel or by torch.

Knows the model, the KV cache and the kernels' records; knows no scheduling policy and no requests.

Where products are packed 8-bit ones, a step is one `Program`: one call without the interpreter lock, which may run
several decode steps. Where torch multiplies (fp32, bf16), each kernel and each product is a call of its own. Both are
built from `Layer.operations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.engine.arithmetic_code import uniform
from workers.engine.batch import BatchRow, SchedulerOutput
from workers.engine.cpu.kv_cache import CacheShape, KVCache
from workers.engine.cpu.layouts import (
    ACTIVATIONS,
    DRAW,
    INT8,
    LAYER,
    LAYER_NORM,
    NORM,
    PLAIN,
    RMS_NORM,
    ROW,
    ROW_TILE,
    STEP,
    TILE,
    TOTALS,
    VECTOR,
)
from workers.engine.cpu.linear import CpuLinear, PackedInt8Linear
from workers.engine.cpu.sampler import CpuSampler, drawn_tokens
from workers.engine.cpu.team import Interrupt, KernelCall, Program, ThreadTeam
from workers.engine.cpu_kernels import Kernels
from workers.engine.draw import Draw
from workers.engine.model.linear import MAX_HEAD_ROWS
from workers.engine.model.transformer import Activate, AddAndNorm, Attend, Linear, Multiply, Transformer
from workers.engine.request import GeneratedToken

# Numbers that a kernel processes from which on it pays to divide them among threads: measured on two cores, for a call
# of its own, which wakes the threads, and within a program, where they are awake.
MIN_SHARED_SIZE = 16_384
MIN_SHARED_SIZE_IN_PROGRAM = 1_000


class _Size(IntEnum):
    """What decides whether an operation is divided among threads: nothing, or the numbers that it processes."""

    NEVER = 0
    ALWAYS = 1
    WIDTH = 2  # rows · n_embd
    INNER = 3  # rows · n_inner
    LENGTH = 4  # positions read · heads


class _KernelOperation(NamedTuple):
    kernel: Any
    parameters_at: int  # NORM or LAYER
    size: _Size
    reads_product: bool
    slot: int  # of the next product, whose input it may prepare


class _ProductOperation(NamedTuple):
    linear: CpuLinear
    num_inputs: int
    is_residual: bool  # the result is added to the residual stream, so it has n_embd columns
    slot: int  # number of the product in its layer


class ForwardPass:
    """Computes steps: keys, values, logits, and the tokens of a multi-step decode.

    Attributes:
        max_decode_rows: the most rows that `decode` takes; 0 where there is no program.
    """

    def __init__(
        self,
        model: Transformer,
        shape: CacheShape,
        cache: KVCache,
        max_rows: int,
        interrupt: Interrupt,
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self._model = model
        self._team = ThreadTeam(kernels, torch.get_num_threads())
        config = model.config
        width, query_width = config.n_embd, config.query_width
        num_padded = 2 * max_rows  # no row count is padded to more
        self._stream = torch.zeros(max_rows, width)
        self._prepared = torch.zeros(num_padded * max(width, query_width, config.n_inner))
        self._scales = torch.zeros(max_rows, 1)
        self._rows, self._tiles = np.zeros(max_rows, ROW), np.zeros(max_rows, ROW_TILE)
        query, mean = torch.zeros(max_rows, query_width), torch.zeros(max_rows, query_width)
        heads_done = np.zeros(max_rows, np.int64)
        score_stride = shape.entry_positions + shape.suffix_positions + 2 * VECTOR
        scratch_stride = max(TILE * (shape.head_size + shape.value_width + TOTALS + score_stride), width + VECTOR)
        scratch = np.zeros((self._team.num_threads, scratch_stride), np.float32)
        end_ids = np.array(config.eos_token_ids, np.int64)
        self._keep_alive = query, mean, heads_done, scratch, end_ids  # kernels know only their addresses
        steps = np.zeros(2, STEP)  # of the layers, and of the head
        self._step, self._head_step = step, head_step = steps[0], steps[1]
        self._step_at, self._head_step_at = _addresses(steps)
        item = shape.dtype.itemsize
        for name, value in {
            "width": width,
            "inner": config.n_inner,
            "is_gated": config.is_gated,
            "norm": RMS_NORM if config.is_rms_norm else LAYER_NORM,
            "num_heads": config.n_head,
            "num_kv_heads": config.num_kv_heads,
            "head_size": config.head_size,
            "activation": ACTIVATIONS[config.activation_function],
            "epsilon": config.norm_epsilon,
            "num_end_ids": len(end_ids),
            "end_ids_at": _address(end_ids),
            "token_embedding_at": _address(model.token_embedding),
            "position_embedding_at": _address(model.position_embedding),
            "rotations_at": _address(model.rotations),
            "stream_at": _address(self._stream),
            "prepared_at": _address(self._prepared),
            "scales_at": _address(self._scales),
            "scales_in_at": _address(self._scales),
            "query_at": _address(query),
            "mean_at": _address(mean),
            "rows_at": _address(self._rows),
            "tiles_at": _address(self._tiles),
            "heads_done_at": _address(heads_done),
            "scratch_at": _address(scratch),
            "scratch_stride": scratch_stride,
            "score_stride": score_stride,
            "item_bytes": item,
            "entry_key_bytes": cache.entries.keys.stride(1) * item,
            "entry_value_bytes": cache.entries.values.stride(1) * item,
            "suffix_key_bytes": cache.suffixes.keys.stride(1) * item,
            "suffix_value_bytes": cache.suffixes.values.stride(1) * item,
        }.items():
            step[name] = value
        self.sampler = CpuSampler(kernels, self._team, config.vocab_size)
        self._make_operations(cache)
        steps[1] = steps[0]
        # The head's norm reads some of the rows, and its scales must not replace those of the product that it adds.
        self._sources, self._head_scales = np.zeros(max_rows, np.int64), torch.zeros(max_rows, 1)
        head_step["sources_at"], head_step["scales_at"] = _address(self._sources), _address(self._head_scales)
        head_step["mode"] = INT8
        self._max_program_rows = self._max_head_rows = self.max_decode_rows = 0
        if all(_packed(linear) for layer in model.layers for linear in (layer.qkv, layer.out, layer.up, layer.down)):
            self._make_program(max_rows, interrupt)

    def _make_operations(self, cache: KVCache) -> None:
        """The layers' operations in order, as kernels and products, and the records that they take."""
        k, model = self._kernels, self._model
        width, query_width, inner = model.config.n_embd, model.config.query_width, model.config.n_inner
        self._layers, self._norms = np.zeros(len(model.layers), LAYER), np.zeros(2 * len(model.layers) + 1, NORM)
        layers_at, norms_at = _addresses(self._layers), _addresses(self._norms)
        num_norms = 0
        self._operations: list[_KernelOperation | _ProductOperation] = []
        bias: Tensor | None = None  # of the last product
        for index, (layer, parameters) in enumerate(zip(model.layers, self._layers, strict=True)):
            parameters["entry_keys_at"] = _address(cache.entries.keys[index])
            parameters["entry_values_at"] = _address(cache.entries.values[index])
            parameters["suffix_keys_at"] = _address(cache.suffixes.keys[index])
            parameters["suffix_values_at"] = _address(cache.suffixes.values[index])
            at, slot, num_inputs = layers_at[index], 0, width
            added: list[_KernelOperation | _ProductOperation] = []
            for operation, following in pairwise((*layer.operations, None)):
                match operation:
                    case AddAndNorm(norm):
                        self._norms[num_norms] = _address(bias), _address(norm.weight), _address(norm.bias)
                        added.append(_KernelOperation(k.add_and_norm, norms_at[num_norms], _Size.WIDTH, True, slot))
                        num_norms += 1
                    case Multiply(linear):
                        is_residual = following is None or isinstance(following, AddAndNorm)
                        added.append(_ProductOperation(_cpu(linear), num_inputs, is_residual, slot))
                        bias, slot, num_inputs = _cpu(linear).bias, slot + 1, width
                    case Attend(query_norm, key_norm):
                        parameters["qkv_bias_at"] = _address(bias)
                        if query_norm is not None and key_norm is not None:
                            parameters["query_norm_at"] = _address(query_norm.weight)
                            parameters["key_norm_at"] = _address(key_norm.weight)
                        added.append(_KernelOperation(k.store_kv, at, _Size.WIDTH, True, slot))
                        added.append(_KernelOperation(k.attend, at, _Size.LENGTH, False, slot))
                        num_inputs = query_width
                    case Activate():
                        parameters["up_bias_at"] = _address(bias)
                        added.append(_KernelOperation(k.activate, at, _Size.INNER, True, slot))
                        num_inputs = inner
            self._operations += added
        # Layers have equal shapes, so the products of one tell the row counts and modes of all.
        self._slots = [operation for operation in added if isinstance(operation, _ProductOperation)]
        self._norms[num_norms] = _address(bias), _address(model.norm.weight), _address(model.norm.bias)
        self._last_norm_at = norms_at[num_norms]

    def _make_program(self, max_rows: int, interrupt: Interrupt) -> None:
        """All layers in one call; if the head is packed, also the head, the draws and the next step's input."""
        k, config = self._kernels, self._model.config
        self._max_program_rows = max_rows
        self._residual = torch.zeros(max_rows, config.n_embd)
        self._wide = torch.zeros(max_rows, max(config.qkv_width, config.up_width))
        residual_at, wide_at, prepared_at = map(_address, (self._residual, self._wide, self._prepared))
        calls: list[Any] = []
        sizes: list[_Size] = []
        products: list[PackedInt8Linear] = []

        def add(size: _Size, *call: Any) -> None:
            calls.append(KernelCall(*call))
            sizes.append(size)

        def add_product(linear: Linear, y_at: int) -> None:
            packed = _packed(linear)
            assert packed is not None
            products.append(packed)
            add(_Size.ALWAYS if packed.is_large else _Size.NEVER, k.multiply, packed.address, prepared_at, y_at)

        y_at = 0
        for operation in self._operations:
            if isinstance(operation, _ProductOperation):
                y_at = residual_at if operation.is_residual else wide_at
                add_product(operation.linear, y_at)
            else:
                product_at = y_at if operation.reads_product else 0
                add(operation.size, operation.kernel, self._step_at, operation.parameters_at, product_at)
        self._num_layer_entries = self._num_logit_entries = len(calls)
        if _packed(self._model.head):
            self.max_decode_rows = self._max_head_rows = min(max_rows, MAX_HEAD_ROWS)
            vocab = config.vocab_size
            self._logits = torch.zeros(self._max_head_rows, vocab)
            logits_at = _address(self._logits)
            add(_Size.WIDTH, k.add_and_norm, self._head_step_at, self._last_norm_at, residual_at)
            add_product(self._model.head, logits_at)
            scale_size = _Size.ALWAYS if vocab > MIN_SHARED_SIZE else _Size.NEVER
            add(scale_size, k.scale, self._head_step_at, vocab, logits_at)
            self._num_logit_entries = len(calls)
            add(_Size.ALWAYS, k.sample, self.sampler.address, 0, logits_at)
            add(_Size.NEVER, k.advance, self._step_at, interrupt.address, self.sampler.address)
        for product, following in pairwise([*products, products[0]]):
            product.precede(following)
        self._program, self._program_sizes = Program(self._team, calls, interrupt), np.array(sizes)

    def decode(self, rows: Sequence[BatchRow], draws: Sequence[Draw], num_steps: int) -> list[list[GeneratedToken]]:
        """Up to `num_steps` decode steps of `rows`, each step's input being the token that the one before it drew.

        An interrupt, and an end-of-text token, end it after the current step.

        Args:
            rows: the rows, at most `max_decode_rows`.
            draws: draws of the first step, one for each row; the kernel can draw them (`sampler.can_draw`).

        Returns:
            The tokens of each step that was computed, [steps][rows].
        """
        num_rows = self._load_batch(SchedulerOutput([], list(rows), [], []))
        table = np.zeros((num_steps + 1, num_rows), DRAW)  # the last step hands its codes on, too
        for column, draw in enumerate(draws):
            table[:, column] = self.sampler.describe(draw, column)
            following = range(draw.position + 2, draw.position + 1 + num_steps)
            table["next_point"][1:num_steps, column] = [uniform(draw.seed, position) for position in following]
        table["rank"][1:] = 0  # a rank is the first token's
        self.sampler.use(table[0])
        num_done = self._run_program(num_rows, len(self._program_sizes), range(num_rows), num_steps)
        return [drawn_tokens(step) for step in table[:num_done]]

    def logits(self, scheduled: SchedulerOutput, wanted: Sequence[int]) -> Tensor:
        """Computes one step; stores the keys and values of all rows.

        Args:
            wanted: ascending numbers of the rows whose logits to return.

        Returns:
            Logits [wanted, vocab] float32, valid until the next step.
        """
        num_rows = self._load_batch(scheduled)
        if num_rows == 0:
            return torch.empty(0, self._model.config.vocab_size)
        if num_rows > self._max_program_rows:
            return self._head(self._run_operations(num_rows), num_rows, wanted)
        if not 0 < len(wanted) <= self._max_head_rows:
            self._run_program(num_rows, self._num_layer_entries)
            return self._head(self._residual[:num_rows], num_rows, wanted)
        self._run_program(num_rows, self._num_logit_entries, wanted)
        return self._logits[: len(wanted)]

    def _run_operations(self, num_rows: int) -> Tensor:
        """The layers, a call for each kernel and product; returns the last product [padded rows, n_embd]."""
        is_shared = self._is_shared(num_rows, MIN_SHARED_SIZE)
        padded = [slot.linear.padded(num_rows) for slot in self._slots]
        inputs = [self._input(number, slot.num_inputs) for slot, number in zip(self._slots, padded, strict=True)]
        self._step["mode"] = PLAIN
        y: Tensor | None = None
        for operation in self._operations:
            if isinstance(operation, _ProductOperation):
                y = operation.linear.multiply(inputs[operation.slot])
                continue
            product_at = y.data_ptr() if y is not None and operation.reads_product else 0
            call = KernelCall(operation.kernel, self._step_at, operation.parameters_at, product_at)
            self._team.run(call, is_shared[operation.size])
        assert y is not None
        return y

    def _run_program(self, num_rows: int, num_entries: int, wanted: Sequence[int] = (), num_times: int = 1) -> int:
        """Runs the program's first entries `num_times` times, the head's for the rows `wanted`; returns how often."""
        self._step["mode"] = INT8
        is_shared = np.array(self._is_shared(num_rows, MIN_SHARED_SIZE_IN_PROGRAM))[self._program_sizes]
        entry_rows = np.full(num_entries, num_rows)
        if wanted:
            self._sources[: len(wanted)] = wanted
            self._head_step["num_rows"] = entry_rows[self._num_layer_entries :] = len(wanted)
        num_done: int = self._program.run(entry_rows, num_entries, is_shared, num_times=num_times)
        return num_done

    def _is_shared(self, num_rows: int, min_size: int) -> tuple[bool, ...]:
        """Whether it pays to divide an operation of each `_Size` among threads."""
        config, rows = self._model.config, self._rows[:num_rows]
        num_read = int(rows["num_in_entry"].sum() + rows["num_in_suffix"].sum())
        return (
            False,
            True,
            num_rows * config.n_embd > min_size,
            num_rows * config.n_inner > 2 * min_size,
            num_read * config.n_head > min_size,
        )

    def _head(self, y: Tensor, num_rows: int, wanted: Sequence[int]) -> Tensor:
        """The logits of the rows `wanted`; `y` [rows, n_embd] is the last layer's product."""
        step, config = self._step, self._model.config
        num_wanted = len(wanted)
        if num_wanted == 0:
            return torch.empty(0, config.vocab_size)
        if num_wanted < num_rows:
            index = torch.tensor(wanted)
            y = y[index]
            self._stream[:num_wanted] = self._stream[index]
            self._scales[:num_wanted] = self._scales[index]
            step["num_rows"] = num_wanted
        head = _cpu(self._model.head)
        padded = head.padded(num_wanted)
        step["mode"] = mode = head.product.mode
        call = KernelCall(self._kernels.add_and_norm, self._step_at, self._last_norm_at, y.data_ptr())
        self._team.run(call, num_wanted * config.n_embd > MIN_SHARED_SIZE, holds_gil=True)
        logits = head.multiply(self._input(padded, config.n_embd, mode))[:num_wanted]
        if head.bias is not None:
            logits += head.bias
        return logits if mode == PLAIN else logits.mul_(self._scales[:num_wanted])

    def _load_batch(self, scheduled: SchedulerOutput) -> int:
        """Fills in the step's rows, the decode rows first, and its tiles; returns the number of rows."""
        by_entry: dict[int, list[int]] = {}
        tiles: list[list[int]] = []
        records = []
        for number, row in enumerate(scheduled.rows):
            token_id = row.sequence.token_ids[-1]
            records.append((token_id, row.position, row.entry.index, row.start, row.suffix, row.suffix_length + 1))
            by_entry.setdefault(row.entry.index, []).append(number)
        for numbers in by_entry.values():
            tiles += [numbers[first : first + TILE] for first in range(0, len(numbers), TILE)]
        num_rows = len(records)
        if records:
            self._rows[:num_rows] = records
        for chunk in scheduled.chunks:
            first, num_rows = num_rows, num_rows + chunk.stop - chunk.start
            rows, positions = self._rows[first:num_rows], np.arange(chunk.start, chunk.stop)
            rows["token_id"], rows["position"] = chunk.group.tokens[chunk.start : chunk.stop], positions
            rows["entry"], rows["num_in_entry"] = chunk.entry.index, positions + 1
            rows["suffix"], rows["num_in_suffix"] = -1, 0
            tiles += [list(range(at, min(at + TILE, num_rows))) for at in range(first, num_rows, TILE)]
        if tiles:
            padding = [0] * TILE
            self._tiles[: len(tiles)] = [(len(tile), [*tile, *padding[len(tile) :]]) for tile in tiles]
        self._step["num_rows"], self._step["num_tiles"] = num_rows, len(tiles)
        return num_rows

    def _input(self, num_rows: int, width: int, mode: int = PLAIN) -> Tensor:
        """The prepared rows as a product takes them."""
        if mode == PLAIN:
            return self._prepared[: num_rows * width].view(num_rows, width)
        width = -(-width // 4) * 4
        return self._prepared.view(torch.uint8)[: num_rows * width].view(num_rows, width)


def _cpu(linear: Linear) -> CpuLinear:
    assert isinstance(linear, CpuLinear)
    return linear


def _packed(linear: Linear) -> PackedInt8Linear | None:
    product = _cpu(linear).product
    return product if isinstance(product, PackedInt8Linear) else None


def _address(array: Any) -> int:
    """The address of a tensor's or array's first element; 0 of None."""
    if array is None:
        return 0
    assert array.is_contiguous() if isinstance(array, Tensor) else array.flags.c_contiguous
    return int(array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data)


def _addresses(records: Any) -> list[int]:
    """The address of each record of an array."""
    return [_address(records) + number * records.itemsize for number in range(len(records))]
