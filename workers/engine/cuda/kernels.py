"""The attention of a decode step as one Triton kernel.

`graphs.py` has the same attention in plain torch, for any other device. Knows KV slots. Does not know sequences and
graphs. Imported only where there is a GPU and Triton; to be used only where `is_correct`.
"""
# mypy: ignore-errors
# Triton has no type hints, and reads those of its kernels itself: they must not become strings.

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # tokens whose keys and values are read together
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@triton.jit(do_not_specialize=["size"])
def _attend(
    qkv,
    slots,
    places,
    out,
    size,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One head of one sequence. Stores the new token's key and value, and attends to them from registers."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(places + size + row)
    entry = tl.load(places + 2 * size + row)
    suffix = tl.load(places + 3 * size + row)
    position = tl.load(places + 5 * size + row)

    dims = tl.arange(0, WIDTH)
    is_dim = dims < HEAD_SIZE
    own = qkv + row * 3 * HEADS * HEAD_SIZE + head * HEAD_SIZE + dims
    query = tl.load(own, mask=is_dim, other=0.0).to(tl.float32)
    key = tl.load(own + HEADS * HEAD_SIZE, mask=is_dim, other=0.0)
    value = tl.load(own + 2 * HEADS * HEAD_SIZE, mask=is_dim, other=0.0)
    slot = slots + (suffix + position) * 2 * HEADS * HEAD_SIZE + head * HEAD_SIZE + dims
    tl.store(slot, key, mask=is_dim)
    tl.store(slot + HEADS * HEAD_SIZE, value, mask=is_dim)

    # Online softmax (Milakov, Gimelshein 2018), started with the new token.
    most = tl.sum(query * key.to(tl.float32), 0)
    total = tl.exp(most - most)
    mean = value.to(tl.float32)
    for first in range(0, position, TOKENS):
        place = first + tl.arange(0, TOKENS)
        is_seen = place < position
        at = (place + tl.where(place < start, entry, suffix)) * 2 * HEADS * HEAD_SIZE
        read = slots + at[:, None] + head * HEAD_SIZE + dims[None, :]
        is_read = is_seen[:, None] & is_dim[None, :]
        keys = tl.load(read, mask=is_read, other=0.0).to(tl.float32)
        values = tl.load(read + HEADS * HEAD_SIZE, mask=is_read, other=0.0).to(tl.float32)
        scores = tl.where(is_seen, tl.sum(query[None, :] * keys, 1), float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 0))
        weights = tl.exp(scores - higher)
        shrink = tl.exp(most - higher)
        mean = mean * shrink + tl.sum(weights[:, None] * values, 0)
        total = total * shrink + tl.sum(weights, 0)
        most = higher
    target = out + row * HEADS * HEAD_SIZE + head * HEAD_SIZE + dims
    tl.store(target, (mean / total).to(out.dtype.element_ty), mask=is_dim)


def attend(qkv: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    """Stores the keys and values of each sequence's new token, and attends to it and all tokens before.

    Args:
        qkv: [sequences, 3 · n_embd] queries (scaled), keys and values.
        slots: [slots, 2, heads, head_size], the KV slots of one layer.
        places: [7, sequences] int64, the integer rows of a batch's table.

    Returns:
        [sequences, n_embd].
    """
    size, (_, _, heads, head_size) = len(qkv), slots.shape
    out = torch.empty(size, heads * head_size, dtype=qkv.dtype, device=qkv.device)
    width = triton.next_power_of_2(head_size)
    _attend[(size, heads)](qkv, slots, places, out, size, heads, head_size, width, BLOCK)
    return out


def is_correct(heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel, on this device and for this shape, equals attention in float32 up to TOLERANCE."""
    generator = torch.Generator().manual_seed(0)
    sequences = [(0, 0, 700), (100, 100, 700), (150, 217, 800), (0, 5, 900)]  # start, position, suffix
    numbers = [[0, start, 300, suffix - start, 1, at, 0] for start, at, suffix in sequences]
    places = torch.tensor(numbers, device=device).T.contiguous()
    width = heads * head_size
    slots = torch.randn(1000, 2, heads, head_size, generator=generator).to(device, dtype)
    qkv = torch.randn(len(sequences), 3 * width, generator=generator).to(device, dtype)
    expected_slots, expected = slots.clone(), []
    for row, (start, at, suffix) in zip(qkv, sequences, strict=True):
        query, new = row[:width].view(heads, 1, head_size), row[width:].view(2, heads, head_size)
        expected_slots[suffix - start + at] = new
        read = [*range(300, 300 + start), *range(suffix, suffix - start + at + 1)]
        keys, values = expected_slots[read].float().permute(1, 2, 0, 3)
        expected.append((query.float() @ keys.mT).softmax(-1) @ values)
    ours = attend(qkv, slots, places).float()
    difference = (ours - torch.stack(expected).view_as(ours)).abs().max()
    return bool(torch.equal(slots, expected_slots) and difference < TOLERANCE[dtype])
