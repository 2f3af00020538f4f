"""Causal attention over a cache, with sums that run in one fixed order.

Knows queries, keys and values. Refuses to know sequences, batches and who shares what.

The promise "same seed, same text, whatever else happens" needs each row's attention to have the
same bits in a prompt of any length, cut in any place, and in a step of one token. So:

- A score is a chain of fused multiply-adds over the head's width, and a sum over positions is such
  a chain from the first position to the last: that is how a matrix kernel computes one element,
  however many it computes. Kernels depart from it for a single row (a dot product is summed in
  another order), for a handful of columns, and past a few hundred summands (they cut the chain to
  fit their caches): so rows are padded to `MIN_ROWS`, positions to a multiple of `COLUMNS`, and the
  sum is cut, by us, every `BLOCK` positions.
- A position that a row may not see has weight 0, and a chain passes over zeros unchanged: padding
  and other rows' positions leave no trace.
- The softmax's denominator is such a sum too: a column of ones beside the values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 4
COLUMNS = 16
BLOCK = 256


def value_width(head_size: int) -> int:
    """Width of a cached value: the head's, the column of ones, and zeros to a multiple of 16."""
    return (head_size // COLUMNS + 1) * COLUMNS


def attend(query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Attention of `rows` consecutive tokens of one sequence.

    Args:
        query: [rows, heads, head_size], scaled already.
        keys: [heads, positions, head_size], the rows' own included.
        values: [heads, positions, value_width]; column head_size holds ones, those past it zeros.
        start: the first row's position.

    Returns:
        [rows, heads · head_size].
    """
    num_rows, num_heads, head_size = query.shape
    stop = start + num_rows
    padded = -(-stop // COLUMNS) * COLUMNS
    query = query.transpose(0, 1)
    if num_rows < MIN_ROWS:
        query = F.pad(query, (0, 0, 0, MIN_ROWS - num_rows))
    scores = torch.bmm(query, keys[:, :padded].transpose(1, 2))
    hidden = torch.ones(query.shape[1], padded - start, dtype=torch.bool, device=query.device)
    scores[:, :, start:].masked_fill_(hidden.triu(1), float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    sums = torch.bmm(weights[:, :, :BLOCK], values[:, : min(BLOCK, padded)])
    for first in range(BLOCK, padded, BLOCK):
        last = min(first + BLOCK, padded)
        sums += torch.bmm(weights[:, :, first:last], values[:, first:last])
    sums = sums[:, :num_rows].transpose(0, 1)
    mean = sums[..., :head_size] / sums[..., head_size : head_size + 1]
    return mean.reshape(num_rows, num_heads * head_size)
