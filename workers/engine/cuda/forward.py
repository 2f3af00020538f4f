"""Computes logits from token ids on a GPU: `StepKernels` for a decode step, plain torch for prefill.

Walks `Layer.operations`. A norm, an activation and a residual addition are part of the product beside them, so a layer
is four products and attention. Knows the model and kernels. Does not know batches, graphs and which kernels are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from workers.engine.cuda.step_kernels import Attention, Product, StepKernels, TorchKernels, embed, multiply
from workers.engine.model.transformer import (
    Activate,
    AddAndNorm,
    Attend,
    Multiply,
    Norm,
    Operation,
    Transformer,
)

# layer, its attention, and [rows, qkv_width] queries (scaled), keys and values → [rows, heads · head_size]; stores the
# keys and values
AttendFn = Callable[[int, Attention, Tensor], Tensor]
MultiplyFn = Callable[[Product, Tensor, Tensor | None], Tensor]  # as `step_kernels.multiply`


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


def decode(model: Transformer, layers: Tensor, table: Tensor, out: Tensor, kernels: StepKernels) -> Tensor:
    """One decode step: draws each sequence's next token, and advances the table.

    Args:
        layers: [layers, slots, 2, heads, head_size], the KV slots.
        table: [TABLE_ROWS, sequences] float64.
        out: the tokens, as `StepKernels.draw` stores them.

    Returns:
        Logits [sequences, vocab] float32.
    """
    x = kernels.begin(table, model.token_embedding, model.position_embedding)

    def attend(layer: int, attention: Attention, qkv: Tensor) -> Tensor:
        return kernels.attend(attention, qkv, layers[layer], table)

    run_layers(model, x, kernels.multiply, attend)
    logits = kernels.multiply(Product(model.head, model.norm), x, None)
    kernels.draw(logits, table, out)
    return logits


def prefill(model: Transformer, token_ids: Tensor, positions: Tensor, attend: AttendFn) -> Tensor:
    """[rows] token ids and positions → [rows, n_embd], the residual stream after the last layer."""
    x = embed(token_ids, positions, model.token_embedding, model.position_embedding)
    run_layers(model, x, multiply, attend)
    return x


def run_layers(model: Transformer, x: Tensor, multiply: MultiplyFn, attend: AttendFn) -> None:
    """Computes all layers on x [rows, n_embd], the residual stream, in place."""
    for index, layer in enumerate(model.layers):
        y: Tensor | None = None
        for operation in fuse(model, layer.operations):
            if isinstance(operation, Product):
                y = multiply(operation, x, y)
            else:
                assert y is not None
                y = attend(index, operation, y)


def fuse(model: Transformer, operations: Sequence[Operation]) -> list[Product | Attention]:
    """The operations of a layer, with norms, activations and residual additions joined to the products beside them."""
    fused: list[Product | Attention] = []
    norm: Norm | None = None
    for operation in operations:
        match operation:
            case AddAndNorm(norm):
                _add_last(fused)
            case Multiply(linear):
                fused.append(Product(linear, norm))
                norm = None
            case Activate():
                last = fused[-1]
                assert isinstance(last, Product)
                fused[-1] = replace(last, activate=model.activate)
            case Attend(query_norm, key_norm):
                fused.append(Attention(query_norm, key_norm, model.rotations))
    _add_last(fused)
    return fused


def _add_last(fused: list[Product | Attention]) -> None:
    """The norm that follows, or the layer's end, adds the last product to the residual stream."""
    if fused and isinstance(last := fused[-1], Product):
        fused[-1] = replace(last, is_added=True)
