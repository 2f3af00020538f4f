"""Computes logits from token ids on a GPU: matrix products, and `StepKernels` between them.

Walks `Layer.operations`. A bias and a GELU are computed by the product before them, so a layer takes seven kernels:
four products, two additions with a norm, and attention. Knows the model and kernels. Does not know batches, graphs and
which kernels are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.cuda.step_kernels import POSITION, StepKernels, TorchKernels, embed
from workers.engine.model.linear import DeviceLinear
from workers.engine.model.transformer import (
    Activate,
    AddAndNorm,
    Attend,
    Linear,
    Multiply,
    Norm,
    Operation,
    Transformer,
)

# layer, [rows, qkv_width] queries (scaled), keys and values → [rows, heads · head_size]; stores the keys and values
AttendFn = Callable[[int, Tensor], Tensor]
# (x, y, norm) → norm(x), after y is added to x in place, if there is one
AddNormFn = Callable[[Tensor, Tensor | None, Norm], Tensor]


@dataclass(frozen=True, slots=True)
class DecodeKernels:
    """The kernels of a decode step.

    Attributes:
        make: the kernels of a program, from the number of tokens that it attends to at most.
        is_length_bound: `attend` reads that many tokens of each sequence, so there is a program for each length bucket.
            Otherwise it reads the tokens that a sequence has, and one program serves all lengths.
    """

    make: Callable[[int], StepKernels]
    is_length_bound: bool


PLAIN_KERNELS = DecodeKernels(TorchKernels, is_length_bound=True)


@dataclass(frozen=True, slots=True)
class MultiplyAndActivate:
    """y ← activation(linear(y))."""

    linear: Linear


def decode(model: Transformer, layers: Tensor, table: Tensor, kernels: StepKernels) -> tuple[Tensor, Tensor]:
    """One decode step: draws each sequence's next token, and advances the table.

    Args:
        layers: [layers, slots, 2, heads, head_size], the KV slots.
        table: [TABLE_ROWS, sequences] float64.

    Returns:
        Logits [sequences, vocab] float32, and the tokens, as `StepKernels.draw` gives them.
    """
    integers, x = kernels.begin(table, model.token_embedding, model.position_embedding)
    y = run_layers(
        model,
        x,
        integers[POSITION],
        kernels.add_norm,
        lambda layer, qkv: kernels.attend(qkv, layers[layer], integers),
    )
    logits = model.head(kernels.add_norm(x, y, model.norm))
    return logits, kernels.draw(logits, table)


def prefill(model: Transformer, token_ids: Tensor, positions: Tensor, attend: AttendFn) -> Tensor:
    """[rows] token ids and positions → [rows, n_embd], the residual stream after the last layer."""
    x = embed(token_ids, positions, model.token_embedding, model.position_embedding)
    y = run_layers(model, x, positions, _add_norm, attend)
    return x if y is None else x + y


def run_layers(
    model: Transformer, x: Tensor, positions: Tensor, add_norm: AddNormFn, attend: AttendFn
) -> Tensor | None:
    """Computes all layers on x [rows, n_embd], the residual stream, which is changed in place.

    Returns:
        What the next norm has to add to x; None if there are no layers.
    """
    y: Tensor | None = None
    for index, layer in enumerate(model.layers):
        for operation in fuse(layer.operations):
            if isinstance(operation, AddAndNorm):
                y = add_norm(x, y, operation.norm)
                continue
            assert y is not None
            match operation:
                case Multiply(linear):
                    y = linear(y)
                case MultiplyAndActivate(linear):
                    y = _activated_product(model, linear, y)
                case Attend():
                    y = attend(index, model.place(operation, y, positions))
                case Activate():
                    y = model.activate(y)
    return y


def fuse(operations: Sequence[Operation]) -> list[Operation | MultiplyAndActivate]:
    """The operations, with each activation joined to the product before it."""
    fused: list[Operation | MultiplyAndActivate] = []
    for operation in operations:
        if isinstance(operation, Activate) and fused and isinstance(before := fused[-1], Multiply):
            fused[-1] = MultiplyAndActivate(before.linear)
        else:
            fused.append(operation)
    return fused


def has_gelu_epilogue(weight: Tensor) -> bool:
    """Whether a product with `weight` can compute the tanh form of GELU before it stores its result.

    torch's CUDA product does so with cuBLASLt's epilogue, or by `gelu_(…, "tanh")` where it uses plain cuBLAS; on a CPU
    the same function computes the form with erf. Source: `addmm_out_cuda_impl` in aten/src/ATen/native/cuda/Blas.cpp.
    """
    return weight.is_cuda


def _activated_product(model: Transformer, linear: Linear, y: Tensor) -> Tensor:
    if model.has_tanh_gelu and isinstance(linear, DeviceLinear):
        weight, bias = linear.weight, linear.bias
        if bias is not None and has_gelu_epilogue(weight):
            return torch._addmm_activation(bias, y, weight.T, use_gelu=True)
    return model.activate(linear(y))


def _add_norm(x: Tensor, y: Tensor | None, norm: Norm) -> Tensor:
    if y is not None:
        x += y
    return norm(x)
