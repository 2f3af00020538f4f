"""`StepKernels` in Triton: two kernels of a layer and three outside, each with sums in a fixed order.

A row's results have the same bits whatever the other rows of the batch are. Knows tensors, KV slots and the layout of a
batch's table. Does not know sequences and graphs.
"""
# mypy: ignore-errors
# Triton has no type hints.

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workers.engine.cuda.kernels import attention
from workers.engine.cuda.kernels.attention import ATTEND
from workers.engine.cuda.kernels.embedding import BEGIN, ROWS
from workers.engine.cuda.kernels.launch import Launcher
from workers.engine.cuda.kernels.norm import ADD_NORM
from workers.engine.cuda.kernels.sampling import DRAW, FIND_CANDIDATES, LOG_BLOCK
from workers.engine.cuda.step_kernels import (
    AT,
    ENTRY,
    ID,
    MOVES,
    NEXT_POINTS,
    POINT,
    POSITION,
    START,
    SUFFIX,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WIDTH,
)
from workers.engine.draw import NUM_CANDIDATES
from workers.engine.model.config import ModelConfig
from workers.engine.model.transformer import Norm

LOG_CANDIDATES = NUM_CANDIDATES.bit_length() - 1


class TritonKernels:
    """`StepKernels` on a GPU, or on a CPU in Triton's interpreter. For one stream and thread at a time."""

    def __init__(
        self, config: ModelConfig, max_sequences: int, device: torch.device, launcher: Launcher | None = None
    ) -> None:
        """
        Args:
            max_sequences: rows of the largest batch.
            launcher: what launches the kernels; None for the device's.

        Raises:
            ModuleNotFoundError: if cuda-bindings is not installed.
            RuntimeError: if the CUDA driver reports an error.
        """
        self._launcher = launcher or Launcher(device)
        heads, self._head_width = config.n_head, triton.next_power_of_2(config.head_size)
        self._split = attention.split_size(config.n_positions)
        self._num_splits = attention.num_splits(config.n_positions)
        self._max_splits = triton.next_power_of_2(self._num_splits)
        means = (max_sequences, heads, self._max_splits, self._head_width)
        self._partial_means = torch.empty(means, device=device)
        self._partial_weights = torch.empty(max_sequences, heads, 2, self._max_splits, device=device)
        self._num_done = torch.zeros(max_sequences, heads, dtype=torch.int32, device=device)
        self._num_blocks = -(-config.vocab_size >> LOG_BLOCK)
        keys = (max_sequences, self._num_blocks, NUM_CANDIDATES)
        self._keys = torch.empty(keys, dtype=torch.int64, device=device)
        self._sums = torch.empty(max_sequences, 2, self._num_blocks, device=device)

    def begin(self, table: Tensor, token_embedding: Tensor, position_embedding: Tensor | None) -> tuple[Tensor, Tensor]:
        assert position_embedding is not None
        size, width = table.shape[1], token_embedding.shape[1]
        integers = torch.empty(TEMPERATURE, size, dtype=torch.int64, device=table.device)
        x = torch.empty(size, width, dtype=token_embedding.dtype, device=table.device)
        self._launcher.launch(
            BEGIN,
            (size, 1, 1),
            table,
            token_embedding,
            position_embedding,
            integers,
            x,
            table.stride(0),
            size,
            ID=ID,
            POSITION=POSITION,
            NUM_INTEGERS=TEMPERATURE,
            ROWS=ROWS,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
        )
        return integers, x

    def add_norm(self, x: Tensor, y: Tensor | None, norm: Norm) -> Tensor:
        size, width = x.shape
        assert norm.bias is not None
        out = torch.empty_like(x)
        self._launcher.launch(
            ADD_NORM,
            (size, 1, 1),
            x,
            x if y is None else y,
            norm.weight,
            norm.bias,
            out,
            float(norm.epsilon),
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            ADDS=y is not None,
        )
        return out

    def attend(self, qkv: Tensor, slots: Tensor, integers: Tensor) -> Tensor:
        size, (_, _, heads, head_size) = len(qkv), slots.shape
        out = torch.empty(size, heads * head_size, dtype=qkv.dtype, device=qkv.device)
        self._launcher.launch(
            ATTEND,
            (heads, self._num_splits, size),
            qkv,
            slots,
            integers,
            out,
            self._partial_means,
            self._partial_weights,
            self._num_done,
            size,
            START=START,
            ENTRY=ENTRY,
            SUFFIX=SUFFIX,
            POSITION=POSITION,
            HEADS=heads,
            HEAD_SIZE=head_size,
            WIDTH=self._head_width,
            TOKENS=attention.TOKENS,
            SPLIT=self._split,
            MAX_SPLITS=self._max_splits,
        )
        return out

    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        size, vocab = logits.shape
        out = torch.empty(4, size, dtype=torch.float64, device=table.device)
        self._launcher.launch(
            FIND_CANDIDATES,
            (self._num_blocks, size, 1),
            logits,
            self._keys,
            self._sums,
            vocab,
            STRIDE=logits.stride(0),
            NUM_BLOCKS=self._num_blocks,
            LOG_BLOCK=LOG_BLOCK,
            LOG_CANDIDATES=LOG_CANDIDATES,
        )
        self._launcher.launch(
            DRAW,
            (size, 1, 1),
            self._keys,
            self._sums,
            table,
            out,
            table.stride(0),
            size,
            vocab,
            ID=ID,
            MOVES=MOVES,
            POSITION=POSITION,
            AT=AT,
            TEMPERATURE=TEMPERATURE,
            TOP_K=TOP_K,
            TOP_P=TOP_P,
            POINT=POINT,
            WIDTH=WIDTH,
            NEXT_POINTS=NEXT_POINTS,
            NUM_BLOCKS=self._num_blocks,
            LOG_BLOCKS=(self._num_blocks - 1).bit_length(),
            LOG_CANDIDATES=LOG_CANDIDATES,
        )
        return out
