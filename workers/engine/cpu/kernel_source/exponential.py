"""exp in float32, as vector instructions and for single numbers.

exp(x) = 2ⁿ · exp(r), n = round(x / log 2), r = x - n · log 2, |r| ≤ ½ log 2; log 2 is split in two floats so that r is
exact. exp(r) = 1 + r + r² · P(r): Cephes' polynomial (Moshier, expf), highest power first. Within 2 units in the last
place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit

from workers.engine.cpu.kernel_source.ir import FAST_MATH, FLOATS, INTS, const_floats, fma, larger
from workers.engine.cpu.layouts import VECTOR

_f32, _i32 = np.float32, np.int32
P = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
ROUND = 12582912.0  # 1.5 · 2²³: adding and subtracting it rounds a float32 to an integer, ties to even
LOG2_E, LOG_2_HIGH, LOG_2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
MIN_X, MAX_X = -87.0, 88.0  # beyond, the result would be subnormal or infinite


def exp_floats(builder: Any, x: Any) -> Any:
    """exp of VECTOR float32 that are at most 0; less than MIN_X counts as MIN_X."""
    shift = const_floats(ROUND)
    x = larger(builder, x, const_floats(MIN_X))
    n = builder.fsub(fma(builder, x, const_floats(LOG2_E), shift), shift)
    r = fma(builder, n, const_floats(-LOG_2_HIGH), x)
    r = fma(builder, n, const_floats(-LOG_2_LOW), r)
    p = const_floats(P[0])
    for factor in P[1:]:
        p = fma(builder, p, r, const_floats(factor))
    p = builder.fadd(fma(builder, p, builder.fmul(r, r), r), const_floats(1.0))
    exponent = builder.add(builder.fptosi(n, INTS), ir.Constant(INTS, [127] * VECTOR))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(INTS, [23] * VECTOR)), FLOATS)
    return builder.fmul(p, power)


@njit(inline="always", **FAST_MATH)
def exp(x: Any) -> Any:
    """exp of a float32; x is limited to [MIN_X, MAX_X]."""
    x = max(_f32(MIN_X), x)
    x = min(_f32(MAX_X), x)
    n = (x * _f32(LOG2_E) + _f32(ROUND)) - _f32(ROUND)
    r = x - n * _f32(LOG_2_HIGH)
    r = r - n * _f32(LOG_2_LOW)
    p = _f32(P[0])
    p = p * r + _f32(P[1])
    p = p * r + _f32(P[2])
    p = p * r + _f32(P[3])
    p = p * r + _f32(P[4])
    p = p * r + _f32(P[5])
    p = p * r * r + r + _f32(1.0)
    return p * _i32((_i32(n) + 127) << 23).view(np.float32)
