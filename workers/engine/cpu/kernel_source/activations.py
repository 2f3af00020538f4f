"""The activation functions between a layer's two last products. Formulas as transformers' `ACT2FN` has them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cfunc, njit

from workers.engine.cpu.kernel_source.exponential import exp
from workers.engine.cpu.kernel_source.ir import FAST_MATH, KERNEL, floats, matrix, record
from workers.engine.cpu.kernel_source.norms import prepare
from workers.engine.cpu.kernel_source.partition import claim
from workers.engine.cpu.layouts import ACTIVATIONS, CALL, LAYER, STEP

_f32 = np.float32
_GELU_TANH, _GELU, _RELU, _SILU = (ACTIVATIONS[name] for name in ("gelu_new", "gelu", "relu", "silu"))
_C = 0.7978845608028654  # √(2/π)


@njit(**FAST_MATH)
def _activate(row: Any, activation: int) -> None:
    """f(row) in place, float32.

    gelu_new: ½x(1 + tanh u), u = √(2/π)(x + 0.044715x³), computed as x / (1 + exp(−2u))
    gelu: ½x(1 + erf(x / √2));  relu: max(0, x);  silu: x / (1 + exp(−x));  tanh
    """
    if activation == _GELU_TANH:
        for i in range(len(row)):
            x = row[i]
            t = x * (_f32(-2 * _C) + _f32(-2 * _C * 0.044715) * (x * x))
            row[i] = x / (_f32(1) + exp(t))
    elif activation == _GELU:
        for i in range(len(row)):
            x = row[i]
            row[i] = _f32(0.5) * x * (_f32(1) + _f32(math.erf(x * _f32(0.7071067811865476))))
    elif activation == _RELU:
        for i in range(len(row)):
            x = row[i]
            row[i] = max(_f32(0), x)
    elif activation == _SILU:
        for i in range(len(row)):
            x = row[i]
            row[i] = x / (_f32(1) + exp(-x))
    else:
        for i in range(len(row)):
            row[i] = _f32(math.tanh(row[i]))


@cfunc(KERNEL, **FAST_MATH)
def activate(call_at: int, thread: int) -> None:
    """f(product · scale + bias), prepared for the next product; an item is a row.

    product [rows, inner] float32, overwritten; scales [rows], bias [inner] float32; product and sum are fused.
    The call has a STEP, a LAYER, and the product.
    """
    call = record(call_at, CALL)
    step, layer = record(call.step_at, STEP), record(call.layer_at, LAYER)
    num_rows, inner, activation = step.num_rows, step.inner, step.activation
    product, bias = matrix(call.product_at, num_rows, inner), floats(layer.up_bias_at, inner)
    scales = floats(step.scales_at, num_rows)
    turn = 0
    while True:
        number, turn = claim(call_at, call, thread, turn, num_rows)
        if number >= num_rows:
            return
        scale, row = scales[number], product[number]
        for i in range(inner):
            row[i] = row[i] * scale + bias[i]
        _activate(row, activation)
        prepare(row, number, step)
