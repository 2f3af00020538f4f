"""Linear layers in plain torch, as devices other than the CPU run them. Knows no kernels and no quantization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.model.gpt2 import Linear


def device_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype of weights and activations on a device other than the CPU.

    Raises:
        ValueError: if the device cannot compute with `dtype`.
    """
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype not in dtypes:
        raise ValueError(f"{device} does not support dtype {dtype}; choose {', '.join(dtypes)}")
    return dtypes[dtype]


def device_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A layer in the dtype and on the device of `weight` [out, in]; without a bias it is the head: float32 results."""
    if bias is not None:
        return lambda x: F.linear(x, weight, bias)
    if weight.is_cuda and weight.dtype != torch.float32:
        # In bf16, logits near -100 would be rounded to multiples of 0.5.
        return lambda x: torch.mm(x, weight.T, out_dtype=torch.float32)
    return lambda x: F.linear(x.float(), weight.float())
