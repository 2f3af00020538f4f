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


MAX_HEAD_ROWS = 64  # rows of logits at once; more of them would only evict other data from the caches
# Stands for the logit of an id without a token (a padded vocabulary's): no draw takes it, and unlike minus infinity it
# is a number in every sum and in JSON.
NEVER = -1e30
# Rows of a head's weight: where a row of logits is a multiple of 256 bytes, cuBLAS and kernels read it aligned.
HEAD_ROWS_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """A layer in the dtype and on the device of its weight."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DeviceHead:
    """[rows, n_embd] → float32 logits [rows, vocab], whose rows are padded to a multiple of HEAD_ROWS_MULTIPLE."""

    weight: Tensor  # [padded vocab, n_embd]; the padding is 0
    vocab_size: int
    bias: Tensor | None = None  # [padded vocab] float32

    @classmethod
    def pad(cls, weight: Tensor, bias: Tensor | None = None) -> DeviceHead:
        """The head from its weight [vocab, n_embd] and bias [vocab], which are copied."""
        num_missing = -len(weight) % HEAD_ROWS_MULTIPLE
        padded_bias = None if bias is None else F.pad(bias, (0, num_missing))
        return cls(F.pad(weight, (0, 0, 0, num_missing)), len(weight), padded_bias)

    def __call__(self, x: Tensor) -> Tensor:
        # In bf16, logits near -100 would be rounded to multiples of 0.5.
        if self.weight.is_cuda and self.weight.dtype != torch.float32:
            logits = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        else:
            logits = F.linear(x.float(), self.weight.float())
        if self.bias is not None:
            logits += self.bias
        return logits[:, : self.vocab_size]
