"""Linear layers in plain torch, as devices other than the CPU run them. Knows no kernels and no quantization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def device_dtype(dtype: str, device: str) -> torch.dtype:
    """The dtype of weights and activations on a device other than the CPU.

    Raises:
        ValueError: if the device cannot compute with `dtype`.
    """
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype not in dtypes:
        raise ValueError(f"{device} does not support dtype {dtype}; choose {', '.join(dtypes)}")
    return dtypes[dtype]


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """A layer in the dtype and on the device of its weight; without a bias it is the head: float32 results."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.linear(x, self.weight, self.bias)
        if self.weight.is_cuda and self.weight.dtype != torch.float32:
            # In bf16, logits near -100 would be rounded to multiples of 0.5.
            return torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return F.linear(x.float(), self.weight.float())
