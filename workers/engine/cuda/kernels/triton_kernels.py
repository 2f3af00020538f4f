"""`StepKernels` in Triton: five kernels of a layer and four outside, each with sums in a fixed order.

A row's results have the same bits whatever the other rows of the batch are. Knows tensors, KV slots and the layout of a
batch's table. Does not know sequences and graphs.
"""
# mypy: ignore-errors
# Triton has no type hints.

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from workers.engine.cuda.kernels.attention import ATTEND, MAX_COMBINED, MAX_PROGRAMS, TILES, TOKENS
from workers.engine.cuda.kernels.embedding import BEGIN
from workers.engine.cuda.kernels.launch import Launcher
from workers.engine.cuda.kernels.norm import ADD_NORM
from workers.engine.cuda.kernels.product import divide, product_kernel
from workers.engine.cuda.kernels.sampling import DRAW, FIND_CANDIDATES, LOG_BLOCK
from workers.engine.cuda.step_kernels import Attention, Product
from workers.engine.draw import NUM_CANDIDATES
from workers.engine.model.config import ModelConfig
from workers.engine.model.linear import DeviceHead, DeviceLinear
from workers.engine.model.transformer import ACTIVATIONS, Norm, gelu_new

LOG_CANDIDATES = NUM_CANDIDATES.bit_length() - 1
PRODUCT_CAPABILITY = 80  # the first with the instructions of `product`
# Activations that `product` computes.
KERNEL_ACTIVATIONS = {gelu_new: "gelu", F.silu: "silu"}
# Of `product`: all batches up to the default of TERCET_MAX_BATCH, so that texts do not depend on the batch.
MAX_ROWS = 48


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
        self._activation = KERNEL_ACTIVATIONS.get(ACTIVATIONS[config.activation_function], "")
        self._is_gated = config.is_gated
        self._unadded: Tensor | None = None
        heads, self._head_width = config.n_head, triton.next_power_of_2(config.head_size)
        num_splits = -(-config.n_positions // (TOKENS * TILES))
        self._turns = -(-num_splits // MAX_PROGRAMS)
        self._num_programs = -(-num_splits // self._turns)
        self._max_splits = triton.next_power_of_2(num_splits)
        means = (max_sequences, heads, self._max_splits, self._head_width)
        self._partial_means = torch.empty(means, device=device)
        self._partial_weights = torch.empty(max_sequences, heads, 2, self._max_splits, device=device)
        self._num_done = torch.zeros(max_sequences, heads, dtype=torch.int32, device=device)
        self._num_blocks = -(-config.vocab_size >> LOG_BLOCK)
        keys = (max_sequences, self._num_blocks, NUM_CANDIDATES)
        self._keys = torch.empty(keys, dtype=torch.int64, device=device)
        self._sums = torch.empty(max_sequences, 2, self._num_blocks, device=device)

    def begin(self, table: Tensor, token_embedding: Tensor, position_embedding: Tensor | None) -> Tensor:
        self._unadded = None
        size, width = table.shape[1], token_embedding.shape[1]
        x = torch.empty(size, width, dtype=token_embedding.dtype, device=table.device)
        self._launcher.launch(
            BEGIN,
            (size, 1, 1),
            table,
            token_embedding,
            token_embedding if position_embedding is None else position_embedding,
            x,
            table.stride(0),
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            HAS_POSITIONS=position_embedding is not None,
        )
        return x

    def multiply(self, product: Product, x: Tensor, y: Tensor | None) -> Tensor:
        """As `StepKernels.multiply`: up to MAX_ROWS rows by `product`, more by cuBLAS, which is faster there.

        In the second case a result is added to `x` only by the next product with a norm.
        """
        if len(x) <= MAX_ROWS and self.has_equal_products(x.dtype):
            return self._multiply(product, x, y)
        if product.norm is not None:
            y = self._norm(x, product.norm, self._unadded)
            self._unadded = None
        assert y is not None
        out = self._activated(product, y)
        if product.is_added:
            self._unadded = out
            return x
        return out

    def has_equal_products(self, dtype: torch.dtype) -> bool:
        capability = self._launcher.capability
        return capability is None or (capability >= PRODUCT_CAPABILITY and dtype != torch.float32)

    def _activated(self, product: Product, y: Tensor) -> Tensor:
        linear = product.linear
        if product.activate is None:
            return linear(y)
        # torch's CUDA product computes the tanh form of GELU, in an epilogue or after it; on a CPU the form with
        # erf. Source: `addmm_out_cuda_impl` in aten/src/ATen/native/cuda/Blas.cpp.
        has_epilogue = self._activation == "gelu" and not self._is_gated and y.is_cuda
        if has_epilogue and isinstance(linear, DeviceLinear) and linear.bias is not None:
            return torch._addmm_activation(linear.bias, y, linear.weight.T, use_gelu=True)
        return product.activate(linear(y))

    def _multiply(self, product: Product, x: Tensor, y: Tensor | None) -> Tensor:
        linear, norm = product.linear, product.norm
        if isinstance(linear, DeviceHead):
            # By cuBLAS, always with MAX_ROWS rows, so that it takes the same kernel whatever the batch.
            assert norm is not None
            normed = torch.empty(MAX_ROWS, x.shape[1], dtype=x.dtype, device=x.device)
            return linear(self._norm(x, norm, out=normed))[: len(x)]
        assert isinstance(linear, DeviceLinear)
        source = y if norm is None else x
        assert source is not None
        rows, depth = source.shape
        activation = "" if product.activate is None else self._activation
        is_gated = activation != "" and self._is_gated
        width = len(linear.weight) >> is_gated
        out = x if product.is_added else torch.empty(rows, width, dtype=x.dtype, device=x.device)
        sizes = divide(depth, rows, has_norm=norm is not None)
        # x also stands for the tensors that this product does not read.
        self._launcher.launch(
            product_kernel(sizes["SPLITS"]),
            (-(-width // (8 if is_gated else 8 * sizes["GROUPS"])), 1, 1),
            source,
            x if norm is None else norm.weight,
            x if norm is None or norm.bias is None else norm.bias,
            linear.weight,
            x if linear.bias is None else linear.bias,
            x,
            out,
            rows,
            0.0 if norm is None else float(norm.epsilon),
            DEPTH=depth,
            WIDTH=width,
            HAS_NORM=norm is not None,
            IS_RMS=norm is not None and norm.bias is None,
            HAS_BIAS=linear.bias is not None,
            ACTIVATION=activation,
            IS_GATED=is_gated,
            HAS_RESIDUAL=product.is_added,
            **sizes,
        )
        return out if product.activate is None or activation else product.activate(out)

    def _norm(self, x: Tensor, norm: Norm, y: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The norm of x [rows, n_embd], after y is added to it in place.

        Args:
            out: gets the result; it may have more rows.
        """
        size, width = x.shape
        out = torch.empty_like(x) if out is None else out
        self._launcher.launch(
            ADD_NORM,
            (size, 1, 1),
            x,
            x if y is None else y,
            norm.weight,
            norm.weight if norm.bias is None else norm.bias,
            out,
            float(norm.epsilon),
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            ADDS=y is not None,
            IS_RMS=norm.bias is None,
        )
        return out

    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        size, (_, _, kv_heads, head_size) = len(qkv), slots.shape
        heads = qkv.shape[1] // head_size - 2 * kv_heads
        query_norm, key_norm, rotations = attention.query_norm, attention.key_norm, attention.rotations
        out = torch.empty(size, heads * head_size, dtype=qkv.dtype, device=qkv.device)
        self._launcher.launch(
            ATTEND,
            (heads, self._num_programs, size),
            qkv,
            slots,
            table,
            out,
            self._partial_means,
            self._partial_weights,
            self._num_done,
            # qkv also stands for the tensors that this attention does not read.
            qkv if query_norm is None else query_norm.weight,
            qkv if key_norm is None else key_norm.weight,
            qkv if rotations is None else rotations,
            0.0 if query_norm is None else float(query_norm.epsilon),
            table.stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_SIZE=head_size,
            WIDTH=self._head_width,
            TOKENS=TOKENS,
            TILES=TILES,
            TURNS=self._turns,
            MAX_SPLITS=self._max_splits,
            COMBINED=min(self._max_splits, MAX_COMBINED),
            HAS_NORMS=query_norm is not None,
            HAS_ROTATION=rotations is not None,
        )
        return out

    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        size, vocab = logits.shape
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
            NUM_BLOCKS=self._num_blocks,
            LOG_BLOCKS=(self._num_blocks - 1).bit_length(),
            LOG_CANDIDATES=LOG_CANDIDATES,
        )
