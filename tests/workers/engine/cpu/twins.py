"""NumPy twins of the compiled kernels: the formula of each docstring in a few lines, with plain arrays.

`fma` rounds twice in rare cases (its sum is rounded to float64 first) and `np.exp` is more exact than the kernels', so
twins of kernels that use either are compared with a tolerance; the others to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any

import numpy as np

from workers.engine.cpu.layouts import LANES, PLAIN, UNIT

Array = np.ndarray[Any, np.dtype[Any]]
_f32 = np.float32


def fma(a: Any, b: Any, c: Any) -> Array:
    """a · b + c in float32, rounded once."""
    return np.asarray(np.float64(a) * np.float64(b) + np.float64(c)).astype(_f32)


def lane_sum(row: Array, *, is_squared: bool = False) -> np.float32:
    """LANES chains over the row, then the chains in ascending order."""
    chains = np.zeros(LANES, _f32)
    for first in range(0, len(row), LANES):
        piece = row[first : first + LANES]
        own = chains[: len(piece)]
        own[:] = fma(piece, piece, own) if is_squared else own + piece
    return _f32(np.add.accumulate(chains, dtype=_f32)[-1])


def prepare(rows: Array, mode: int) -> tuple[Array, Array]:
    """The next product's input [rows, width] and its scales [rows]."""
    if mode == PLAIN:
        return rows, np.ones(len(rows), _f32)
    scales = np.maximum(np.abs(rows).max(1), np.finfo(_f32).tiny)
    unit = rows / scales[:, None]
    return (unit, scales) if mode == UNIT else (np.rint(fma(unit, 127, 128)).astype(np.uint8), scales)


def add_and_norm(
    stream: Array, product: Array, scales: Array, bias_in: Array, weight: Array, bias: Array, epsilon: float
) -> tuple[Array, Array]:
    """The new residual stream and its norm, [rows, width] both."""
    stream = stream + fma(product, scales[:, None], bias_in)
    return stream, np.stack([norm(row, weight, bias, epsilon) for row in stream])


def norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    centered = x - lane_sum(x) / _f32(len(x))
    inverse = _f32(1) / np.sqrt(lane_sum(centered, is_squared=True) / _f32(len(x)) + _f32(epsilon))
    return fma(centered * inverse, weight, bias)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


def to_cache(numbers: Array, dtype: Any) -> Array:
    """As the KV cache stores float32; float16 saturates."""
    return np.clip(numbers, -65504, 65504).astype(dtype) if dtype == np.float16 else numbers


def attend(query: Array, keys: Array, values: Array) -> Array:
    """[size] query, [positions, size] keys and values in the row's order → [size], in float32."""
    scores = np.zeros(len(keys), _f32)
    for d in range(len(query)):
        scores = fma(query[d], keys[:, d], scores)
    weights = np.exp(scores - scores.max())
    total, mean = _f32(0), np.zeros(len(query), _f32)
    for weight, value in zip(weights, values, strict=True):
        total, mean = total + weight, fma(weight, value, mean)
    return np.asarray(mean * (_f32(1) / total))


def multiply(x: Array, weight: Array, starts: Array, factors: Array) -> Array:
    """[rows, inputs] uint8 and [outputs, inputs] int8 → [rows, outputs] float32."""
    sums = x.astype(np.int64) @ weight.astype(np.int64).T + starts
    return np.asarray(sums.astype(_f32) * factors)
