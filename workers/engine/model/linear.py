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


# Rows of a head's weight: where a row of logits is a multiple of 256 bytes, cuBLAS and kernels read it aligned.
HEAD_ROWS_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """A layer in the dtype and on the device of its weight."""

    weight: Tensor  # [out, in]
    bias: Tensor  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DeviceHead:
    """[rows, n_embd] → float32 logits [rows, vocab], whose rows are padded to a multiple of HEAD_ROWS_MULTIPLE."""

    weight: Tensor  # [padded vocab, n_embd]; the padding is 0
    vocab_size: int

    def __call__(self, x: Tensor) -> Tensor:
        # In bf16, logits near -100 would be rounded to multiples of 0.5.
        if self.weight.is_cuda and self.weight.dtype != torch.float32:
            logits = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        else:
            logits = F.linear(x.float(), self.weight.float())
        return logits[:, : self.vocab_size]


def device_linear(weight: Tensor, bias: Tensor | None) -> DeviceLinear | DeviceHead:
    """A layer from its weight [out, in]; without a bias it is the head, which copies the weight."""
    if bias is not None:
        return DeviceLinear(weight, bias)
    return DeviceHead(F.pad(weight, (0, 0, 0, -len(weight) % HEAD_ROWS_MULTIPLE)), len(weight))
