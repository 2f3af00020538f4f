"""The attention of a decode step as one kernel, split over the context.

A split has a fixed range of positions, so the order of every sum depends only on the sequence's own position, and a
sequence has the same bits alone and in any batch. The last block of a row and head to finish combines the splits, in
the order of their positions (flash decoding; source: Dao et al., "Flash-Decoding for long-context inference", 2023).
Queries and keys are normed and rotated here, where a model does that.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005
# Triton has no type hints, and reads those of its kernels itself: they must not become strings. Its tuples can be
# added, but not unpacked.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.engine.cuda import step_kernels
from workers.engine.cuda.kernels.compile import Kernel

TOKENS = 64  # of a tile of keys or values
TILES = 3  # tiles of a split, which are loaded together
MAX_PROGRAMS = 64  # blocks of a head; of a longer context each computes several splits
MAX_COMBINED = 32  # splits whose means are in registers together
# Rows of the table.
START, ENTRY, SUFFIX = map(tl.constexpr, (step_kernels.START, step_kernels.ENTRY, step_kernels.SUFFIX))
POSITION = tl.constexpr(step_kernels.POSITION)


@triton.jit
def _load_placed(
    head,
    norm_weight,
    rotation,
    epsilon,
    dims,
    HEAD_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
):
    """A query or key [WIDTH], normed; and number i rotated with number i + HEAD_SIZE / 2."""
    is_dim = dims < HEAD_SIZE
    loaded = tl.load(head + dims, mask=is_dim, other=0.0)
    x = loaded.to(tl.float32)
    if HAS_NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HEAD_SIZE + epsilon)
        x = x * scale * tl.load(norm_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_ROTATION:
        HALF: tl.constexpr = HEAD_SIZE // 2
        is_first = dims < HALF
        partner = tl.where(is_first, dims + HALF, dims - HALF)
        other = tl.load(head + partner, mask=is_dim, other=0.0).to(tl.float32)
        if HAS_NORMS:
            other = other * scale * tl.load(norm_weight + partner, mask=is_dim, other=0.0).to(tl.float32)
        angle = tl.where(is_first, dims, partner)
        cosine = tl.load(rotation + angle, mask=is_dim, other=0.0)
        sine = tl.load(rotation + HALF + angle, mask=is_dim, other=0.0)
        x = x * cosine + tl.where(is_first, -other, other) * sine
    return x.to(loaded.dtype)


@triton.jit
def _combine(means, scores, last_split, dims, WIDTH: tl.constexpr, MAX_SPLITS: tl.constexpr, COMBINED: tl.constexpr):
    """The mean [WIDTH] of all splits of a head, COMBINED at a time."""
    for part in tl.static_range(MAX_SPLITS // COMBINED):
        splits = part * COMBINED + tl.arange(0, COMBINED)
        is_split = splits <= last_split
        # Past the first-level cache, which may hold what another launch stored there.
        highests = tl.load(scores + splits, mask=is_split, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(scores + MAX_SPLITS + splits, mask=is_split, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            means + splits[:, None] * WIDTH + dims[None, :],
            mask=is_split[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        if part == 0:
            highest = tl.max(highests, 0)
        else:
            before = highest
            highest = tl.maximum(before, tl.max(highests, 0))
        shrinks = tl.exp(highests - highest)
        if part == 0:
            mean = tl.sum(parts * shrinks[:, None], 0)
            total = tl.sum(totals * shrinks, 0)
        else:
            shrink = tl.exp(before - highest)
            mean = mean * shrink + tl.sum(parts * shrinks[:, None], 0)
            total = total * shrink + tl.sum(totals * shrinks, 0)
    return mean / total


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    qkv,
    slots,
    table,
    out,
    partial_means,
    partial_weights,
    num_done,
    query_norm,
    key_norm,
    rotations,
    epsilon,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    TURNS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINED: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """TURNS splits of one head of one sequence; the last split stores the new token's key and value.

    Args:
        qkv: [rows, (HEADS + 2 · KV_HEADS) · HEAD_SIZE], the queries scaled.
        slots: [slots, 2, KV_HEADS, HEAD_SIZE]; those of earlier tokens are not written in this step.
        table: [rows of a table, rows] float64.
        partial_means: [rows, HEADS, MAX_SPLITS, WIDTH] float32.
        partial_weights: [rows, HEADS, 2, MAX_SPLITS] float32: the highest score, and the sum of weights.
        num_done: [rows, HEADS] int32, the number of splits that are done; 0 between launches.
        query_norm, key_norm: [HEAD_SIZE]; not read without HAS_NORMS.
        rotations: [positions, 2, HEAD_SIZE / 2] float32, cosines and sines; not read without HAS_ROTATION.
        IS_DEPENDENT: compiled for programmatic dependent launch (compute capability 9.0 and newer).
    """
    SPLIT: tl.constexpr = TOKENS * TILES
    GROUP: tl.constexpr = HEADS // KV_HEADS  # query heads that share keys and values
    head = tl.program_id(0)
    kv_head = head // GROUP
    row = tl.program_id(2).to(tl.int64)
    if IS_DEPENDENT:
        gdc_launch_dependents()
    position = tl.load(table + POSITION * table_stride + row).to(tl.int64)
    last_split = position // SPLIT
    for turn in tl.static_range(TURNS):
        split = tl.program_id(1) + turn * tl.num_programs(1)
        if split <= last_split:
            start = tl.load(table + START * table_stride + row).to(tl.int64)
            entry = tl.load(table + ENTRY * table_stride + row).to(tl.int64)
            suffix = tl.load(table + SUFFIX * table_stride + row).to(tl.int64)
            dims = tl.arange(0, WIDTH)
            is_dim = dims < HEAD_SIZE
            first = split.to(tl.int64) * SPLIT + tl.arange(0, TOKENS)
            keys = ()
            values = ()
            for tile in tl.static_range(TILES):
                place = first + tile * TOKENS
                at = (place + tl.where(place < start, entry, suffix)) * 2 * KV_HEADS * HEAD_SIZE
                read = slots + at[:, None] + kv_head * HEAD_SIZE + dims[None, :]
                is_read = (place < position)[:, None] & is_dim[None, :]
                keys = keys + (tl.load(read, mask=is_read, other=0.0),)
                values = values + (tl.load(read + KV_HEADS * HEAD_SIZE, mask=is_read, other=0.0),)
            if IS_DEPENDENT:
                gdc_wait()

            own = qkv + row * (HEADS + 2 * KV_HEADS) * HEAD_SIZE
            own_key = own + (HEADS + kv_head) * HEAD_SIZE
            rotation = rotations + position * HEAD_SIZE
            query = _load_placed(
                own + head * HEAD_SIZE, query_norm, rotation, epsilon, dims, HEAD_SIZE, HAS_NORMS, HAS_ROTATION
            ).to(tl.float32)
            key = _load_placed(own_key, key_norm, rotation, epsilon, dims, HEAD_SIZE, HAS_NORMS, HAS_ROTATION)
            value = tl.load(own_key + KV_HEADS * HEAD_SIZE + dims, mask=is_dim, other=0.0)
            is_last = split == last_split
            slot = slots + (suffix + position) * 2 * KV_HEADS * HEAD_SIZE + kv_head * HEAD_SIZE + dims
            is_stored = is_dim & is_last & (head % GROUP == 0)
            tl.store(slot, key, mask=is_stored)
            tl.store(slot + KV_HEADS * HEAD_SIZE, value, mask=is_stored)
            own_score = tl.where(is_last, tl.sum(query * key.to(tl.float32), 0), float("-inf"))
            scores = ()
            best = tl.full((TOKENS,), float("-inf"), tl.float32)
            for tile in tl.static_range(TILES):
                score = tl.sum(query[None, :] * keys[tile].to(tl.float32), 1)
                score = tl.where(first + tile * TOKENS < position, score, float("-inf"))
                scores = scores + (score,)
                best = tl.maximum(best, score)
            highest = tl.maximum(tl.max(best, 0), own_score)
            sums = tl.zeros((TOKENS,), tl.float32)
            means = tl.zeros((TOKENS, WIDTH), tl.float32)
            for tile in tl.static_range(TILES):
                weights = tl.exp(scores[tile] - highest)
                sums += weights
                means += weights[:, None] * values[tile].to(tl.float32)
            own_weight = tl.exp(own_score - highest)
            total = tl.sum(sums, 0) + own_weight
            mean = tl.sum(means, 0) + own_weight * value.to(tl.float32)

            target = out + row * HEADS * HEAD_SIZE + head * HEAD_SIZE + dims
            if last_split == 0:
                tl.store(target, (mean / total).to(out.dtype.element_ty), mask=is_dim)
            else:
                place_of_head = row * HEADS + head
                means_of_splits = partial_means + place_of_head * MAX_SPLITS * WIDTH
                scores_of_splits = partial_weights + place_of_head * 2 * MAX_SPLITS
                tl.store(means_of_splits + split * WIDTH + dims, mean)
                tl.store(scores_of_splits + split, highest)
                tl.store(scores_of_splits + MAX_SPLITS + split, total)
                # All threads have stored before the counter is released, and read after it is acquired.
                tl.debug_barrier()
                done_before = tl.atomic_add(num_done + place_of_head, 1, sem="acq_rel")
                tl.debug_barrier()
                if done_before == last_split:
                    tl.store(num_done + place_of_head, 0)
                    combined = _combine(
                        means_of_splits, scores_of_splits, last_split, dims, WIDTH, MAX_SPLITS, COMBINED
                    )
                    tl.store(target, combined.to(out.dtype.element_ty), mask=is_dim)


ATTEND = Kernel(_attend)
