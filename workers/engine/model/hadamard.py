"""Changes the weights of a model with RMS norms, and not what it computes, so that it loses less in 8 bits.

In such models a few channels of the residual stream are a hundred times as large as the others. A row is rounded to 8
bits with one scale, so they leave the others few levels. RMSNorm without its weight commutes with a rotation, therefore
the stream can be kept rotated, which spreads each channel over many: the norm's weight and the rotation are folded into
the weights before and after it. The same is done with the values of each head. Source: Ashkboos et al. 2024, QuaRot,
arXiv:2404.00456, section 4, without the rotations during inference.

The rotation of n channels is a random sign for each, and a Hadamard matrix on the first p of them, p being the largest
power of two up to n; then, if p < n, other signs, and the same matrix on the last p. Elementwise operations in a fixed
order compute it, so a checkpoint has the same 8-bit weights on every CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engine.model.config import ModelConfig
from workers.engine.model.transformer import Norm
from workers.engine.model.weights import Affine, LayerWeights

CHUNK_ROWS = 1024  # rotated at once, in the caches
MIN_NORM = 1e-12  # avoids a division by zero where a channel is unused


def rotate(x: Tensor) -> Tensor:
    """The last dimension of x [..., n] float32, rotated."""
    size = x.shape[-1]
    block = 1 << (size.bit_length() - 1)
    signs = torch.randint(0, 2, (2, size, 1), generator=torch.Generator().manual_seed(size)) * 2.0 - 1.0
    starts = (0,) if block == size else (0, size - block)
    rows = x.reshape(-1, size)
    rotated = torch.empty_like(rows)
    for first in range(0, len(rows), CHUNK_ROWS):
        columns = rows[first : first + CHUNK_ROWS].T.contiguous()
        for start, sign in zip(starts, signs, strict=False):
            columns *= sign
            _hadamard(columns[start : start + block])
        rotated[first : first + CHUNK_ROWS] = columns.T
    return rotated.view(x.shape)


def _hadamard(columns: Tensor) -> None:
    """columns [p, ...] ← H · columns, in place, H the orthonormal Hadamard matrix in Sylvester's construction."""
    size = len(columns)
    half = 1
    while half < size:
        first, second = columns.view(size // (2 * half), 2, half, -1).unbind(1)
        difference = first - second
        first += second
        second[:] = difference
        half *= 2
    columns *= size**-0.5


def rotate_input(norm: Norm, weight: Tensor) -> tuple[Norm, Tensor]:
    """A norm and the weight [out, width] after it, which read the rotated residual stream."""
    return Norm(torch.ones_like(norm.weight), None, norm.epsilon), rotate(weight * norm.weight)


def rotate_layer(layer: LayerWeights, config: ModelConfig) -> LayerWeights:
    """The layer on the rotated residual stream, with rotated values, and balanced between its gated products."""
    norm_1, qkv = rotate_input(layer.norm_1, layer.qkv.weight)
    norm_2, up_weight = rotate_input(layer.norm_2, layer.up.weight)
    values = qkv[-config.kv_width :]
    values[:] = rotate(values.T.reshape(-1, config.head_size)).view(-1, config.kv_width).T
    qkv_bias = layer.qkv.bias
    if qkv_bias is not None:
        qkv_bias = qkv_bias.clone()
        qkv_bias[-config.kv_width :] = rotate(qkv_bias[-config.kv_width :].view(-1, config.head_size)).flatten()
    out = rotate(layer.out.weight.view(-1, config.head_size)).view(layer.out.weight.shape)
    up, down = _balance(Affine(up_weight, layer.up.bias), layer.down.weight)
    return layer._replace(
        norm_1=norm_1,
        qkv=Affine(qkv, qkv_bias),
        out=_rotate_output(out, layer.out.bias),
        norm_2=norm_2,
        up=up,
        down=_rotate_output(down, layer.down.bias),
    )


def _rotate_output(weight: Tensor, bias: Tensor | None) -> Affine:
    """A layer, weight [width, in] and bias [width], which adds to the rotated residual stream."""
    return Affine(rotate(weight.T).T.contiguous(), None if bias is None else rotate(bias))


def _balance(up: Affine, down: Tensor) -> tuple[Affine, Tensor]:
    """Scale the channels between gated products, so that none is much larger than the others.

    Channel j of silu(gate) · up is divided by s[j], by way of `up`, and column j of `down` multiplied by it: s[j] =
    √(|gate[j]| · |up[j]| / |down[:, j]|), SmoothQuant with α = ½ (arXiv:2211.10438), where the norms of the weights
    stand for the magnitude of the channel.

    Args:
        up: [2 · inner, width], the gate's weights first.
        down: [width, inner].
    """
    gate_norm, up_norm = up.weight.double().square().sum(1).sqrt().view(2, -1)
    down_norm = down.double().square().sum(0).sqrt()
    scale = (gate_norm * up_norm / down_norm.clamp_min(MIN_NORM)).clamp_min(MIN_NORM).sqrt().float()
    divisor = torch.cat((torch.ones_like(scale), scale))
    bias = None if up.bias is None else up.bias / divisor
    return Affine(up.weight / divisor[:, None], bias), down * scale
