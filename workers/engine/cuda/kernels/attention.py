"""The attention of a decode step as one kernel, split over the context.

A split has a fixed range of positions, so the order of every sum depends only on the sequence's own position, and a
sequence has the same bits alone and in any batch. The last block of a row and head to finish combines the splits, in
the order of their positions (flash decoding; source: Dao et al., "Flash-Decoding for long-context inference", 2023).
"""
# mypy: ignore-errors
# Triton has no type hints, and reads those of its kernels itself: they must not become strings.

import triton
import triton.language as tl

from workers.engine.cuda.kernels.compile import Kernel

TOKENS = 64  # tokens whose keys and values are read together
MAX_SPLITS = 16


def split_size(n_ctx: int) -> int:
    """Positions of a split: a multiple of TOKENS, with at most MAX_SPLITS splits in `n_ctx` positions."""
    return TOKENS * -(-n_ctx // (TOKENS * MAX_SPLITS))


def num_splits(n_ctx: int) -> int:
    return -(-n_ctx // split_size(n_ctx))


@triton.jit(do_not_specialize=["size"])
def _attend(
    qkv,
    slots,
    integers,
    out,
    partial_means,
    partial_weights,
    num_done,
    size,
    START: tl.constexpr,
    ENTRY: tl.constexpr,
    SUFFIX: tl.constexpr,
    POSITION: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """One split of one head of one sequence; the last split stores the new token's key and value.

    Args:
        partial_means: [size, HEADS, MAX_SPLITS, WIDTH] float32.
        partial_weights: [size, HEADS, 2, MAX_SPLITS] float32: the highest score, and the sum of weights.
        num_done: [size, HEADS] int32, the number of splits that are done; 0 between launches.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    position = tl.load(integers + POSITION * size + row)
    last_split = position // SPLIT
    if split <= last_split:
        start = tl.load(integers + START * size + row)
        entry = tl.load(integers + ENTRY * size + row)
        suffix = tl.load(integers + SUFFIX * size + row)
        dims = tl.arange(0, WIDTH)
        is_dim = dims < HEAD_SIZE
        own = qkv + row * 3 * HEADS * HEAD_SIZE + head * HEAD_SIZE + dims
        query = tl.load(own, mask=is_dim, other=0.0).to(tl.float32)
        highest = float("-inf")
        total = 0.0
        mean = tl.zeros([WIDTH], tl.float32)
        # Online softmax (Milakov, Gimelshein 2018), started with the new token in the last split.
        if split == last_split:
            key = tl.load(own + HEADS * HEAD_SIZE, mask=is_dim, other=0.0)
            value = tl.load(own + 2 * HEADS * HEAD_SIZE, mask=is_dim, other=0.0)
            slot = slots + (suffix + position) * 2 * HEADS * HEAD_SIZE + head * HEAD_SIZE + dims
            tl.store(slot, key, mask=is_dim)
            tl.store(slot + HEADS * HEAD_SIZE, value, mask=is_dim)
            highest = tl.sum(query * key.to(tl.float32), 0)
            total = 1.0
            mean = value.to(tl.float32)
        begin = split * SPLIT
        for first in range(begin, tl.minimum(begin + SPLIT, position), TOKENS):
            place = first + tl.arange(0, TOKENS)
            is_seen = place < position
            at = (place + tl.where(place < start, entry, suffix)) * 2 * HEADS * HEAD_SIZE
            read = slots + at[:, None] + head * HEAD_SIZE + dims[None, :]
            is_read = is_seen[:, None] & is_dim[None, :]
            keys = tl.load(read, mask=is_read, other=0.0).to(tl.float32)
            values = tl.load(read + HEADS * HEAD_SIZE, mask=is_read, other=0.0).to(tl.float32)
            scores = tl.where(is_seen, tl.sum(query[None, :] * keys, 1), float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 0))
            weights = tl.exp(scores - higher)
            shrink = tl.exp(highest - higher)
            mean = mean * shrink + tl.sum(weights[:, None] * values, 0)
            total = total * shrink + tl.sum(weights, 0)
            highest = higher

        target = out + row * HEADS * HEAD_SIZE + head * HEAD_SIZE + dims
        if last_split == 0:
            tl.store(target, (mean / total).to(out.dtype.element_ty), mask=is_dim)
        else:
            place_of_head = row * HEADS + head
            means = partial_means + place_of_head * MAX_SPLITS * WIDTH
            scores_of_splits = partial_weights + place_of_head * 2 * MAX_SPLITS
            tl.store(means + split * WIDTH + dims, mean)
            tl.store(scores_of_splits + split, highest)
            tl.store(scores_of_splits + MAX_SPLITS + split, total)
            # All threads have stored before the counter is released, and read after it is acquired.
            tl.debug_barrier()
            done_before = tl.atomic_add(num_done + place_of_head, 1, sem="acq_rel")
            tl.debug_barrier()
            if done_before == last_split:
                tl.store(num_done + place_of_head, 0)
                splits = tl.arange(0, MAX_SPLITS)
                is_split = splits <= last_split
                # Past the first-level cache, which may hold what another launch stored there.
                highests = tl.load(scores_of_splits + splits, mask=is_split, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(scores_of_splits + MAX_SPLITS + splits, mask=is_split, other=0.0, cache_modifier=".cg")
                parts = tl.load(
                    means + splits[:, None] * WIDTH + dims[None, :],
                    mask=is_split[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                shrinks = tl.exp(highests - tl.max(highests, 0))
                combined = tl.sum(parts * shrinks[:, None], 0) / tl.sum(totals * shrinks, 0)
                tl.store(target, combined.to(out.dtype.element_ty), mask=is_dim)


ATTEND = Kernel(_attend)
