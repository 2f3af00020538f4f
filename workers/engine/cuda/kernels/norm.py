"""The residual addition and the norm after it, as one kernel."""
# mypy: ignore-errors
# Triton has no type hints, and reads those of its kernels itself: they must not become strings.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.engine.cuda.kernels.compile import Kernel


@triton.jit
def _add_norm(
    x,
    y,
    weight,
    bias,
    out,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    IS_RMS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One row of x [rows, WIDTH], which becomes x + y if ADDS; its norm goes to `out`. Statistics in float32.

    Args:
        bias: not read if IS_RMS: RMSNorm has neither a bias nor a mean.
    """
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    is_dim = dims < WIDTH
    scale = tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    if not IS_RMS:
        shift = tl.load(bias + dims, mask=is_dim, other=0.0).to(tl.float32)
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.load(x + row * WIDTH + dims, mask=is_dim, other=0.0).to(tl.float32)
    if ADDS:
        sums += tl.load(y + row * WIDTH + dims, mask=is_dim, other=0.0).to(tl.float32)
        rounded = sums.to(x.dtype.element_ty)
        tl.store(x + row * WIDTH + dims, rounded, mask=is_dim)
        sums = rounded.to(tl.float32)
    centered = sums
    if not IS_RMS:
        mean = tl.sum(sums, 0) / WIDTH
        centered = tl.where(is_dim, sums - mean, 0.0)
    variance = tl.sum(centered * centered, 0) / WIDTH
    normed = centered * (1.0 / tl.sqrt(variance + epsilon)) * scale
    if not IS_RMS:
        normed += shift
    tl.store(out + row * WIDTH + dims, normed.to(out.dtype.element_ty), mask=is_dim)


ADD_NORM = Kernel(_add_norm)
