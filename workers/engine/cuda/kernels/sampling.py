"""Sampling as two kernels: the likeliest tokens of each block of the vocabulary, then the draw.

Logits and token ids are sorted as one 64-bit key, so that equal logits are in the order of their ids, on any device and
in any batch. Computes what `sampling.pick` does, in float64.
"""
# mypy: ignore-errors
# Triton has no type hints, and reads those of its kernels itself: they must not become strings.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.engine import arithmetic_code, logits_processors
from workers.engine.cuda import step_kernels
from workers.engine.cuda.kernels.compile import Kernel

LOG_BLOCK = 10  # of 1,024 tokens of the vocabulary
# Below the key of any logit.
NO_KEY = tl.constexpr(-(2**63))
LOW_BITS = tl.constexpr(2**32 - 1)
MIN_WIDTH = tl.constexpr(arithmetic_code.MIN_WIDTH)
MIN_TEMPERATURE = tl.constexpr(logits_processors.MIN_TEMPERATURE)
# Rows of the table.
ID, MOVES, POSITION = map(tl.constexpr, (step_kernels.ID, step_kernels.MOVES, step_kernels.POSITION))
TEMPERATURE, TOP_K = tl.constexpr(step_kernels.TEMPERATURE), tl.constexpr(step_kernels.TOP_K)
TOP_P, POINT, WIDTH = map(tl.constexpr, (step_kernels.TOP_P, step_kernels.POINT, step_kernels.WIDTH))
AT, NEXT_POINTS = tl.constexpr(step_kernels.AT), tl.constexpr(step_kernels.NEXT_POINTS)


@triton.jit
def _is_second(AXIS: tl.constexpr, NUM_DIMS: tl.constexpr):
    """For each place of a hypercube, whether it is the second along AXIS."""
    return tl.reshape(tl.arange(0, 2), [1] * AXIS + [2] + [1] * (NUM_DIMS - 1 - AXIS)) == 1


@triton.jit
def _exchange(keys, is_larger_first, AXIS: tl.constexpr, NUM_DIMS: tl.constexpr):
    """Orders each two keys along AXIS: the larger first, or second."""
    # Integers wrap around. On a GPU, a sum of two is an exchange of registers.
    others = tl.sum(keys, AXIS, keep_dims=True) - keys
    return tl.where((others > keys) == (_is_second(AXIS, NUM_DIMS) != is_larger_first), others, keys)


@triton.jit
def _order(keys, STAGE: tl.constexpr, NUM_DIMS: tl.constexpr):
    """Orders bitonic runs of 2**STAGE keys, in turn ascending and descending; a single run is descending.

    Args:
        keys: int64, a hypercube: NUM_DIMS dimensions of 2.
    """
    if STAGE < NUM_DIMS:
        is_larger_first = _is_second(NUM_DIMS - 1 - STAGE, NUM_DIMS)
    else:
        is_larger_first = tl.full([1] * NUM_DIMS, 1, tl.int1)
    for step in tl.static_range(STAGE):
        keys = _exchange(keys, is_larger_first, NUM_DIMS - STAGE + step, NUM_DIMS)
    return keys


@triton.jit
def _find_largest(keys, LOG_SIZE: tl.constexpr, LOG_LARGEST: tl.constexpr, ARE_RUNS: tl.constexpr):
    """The 2**LOG_LARGEST largest of 2**LOG_SIZE different keys, in descending order: a bitonic sort of runs, of which
    pairs are merged.

    `tl.topk` does the same with a sum that Triton's interpreter computes element by element.
    Source: Shanbhag, Pirk, Madden, "Efficient top-k query processing on massively parallel hardware", SIGMOD 2018.

    Args:
        ARE_RUNS: each 2**LOG_LARGEST keys are ordered already, in turn ascending and descending.
    """
    cube = tl.reshape(keys, [2] * LOG_SIZE)
    if not ARE_RUNS:
        for stage in tl.static_range(1, LOG_LARGEST + 1):
            cube = _order(cube, stage, LOG_SIZE)
    for merge in tl.static_range(LOG_SIZE - LOG_LARGEST):
        # The larger of each pair of an ascending and a descending run are the largest of both.
        cube = tl.max(cube, LOG_SIZE - 1 - merge - LOG_LARGEST)
        cube = _order(cube, LOG_LARGEST, LOG_SIZE - 1 - merge)
    return tl.reshape(cube, [2**LOG_LARGEST])


@triton.jit
def _find_candidates(
    logits,
    keys,
    sums,
    vocab,
    STRIDE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
    LOG_CANDIDATES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One block of the vocabulary of one row: its likeliest tokens, and the sum of its exponentials.

    Args:
        logits: float32, STRIDE numbers from one row to the next.
        keys: [rows, NUM_BLOCKS, CANDIDATES] int64.
        sums: [rows, 2, NUM_BLOCKS] float32: the highest logit h, and the sum of exp(logit - h).
    """
    BLOCK: tl.constexpr = 2**LOG_BLOCK
    CANDIDATES: tl.constexpr = 2**LOG_CANDIDATES
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(logits + row * STRIDE + ids, mask=is_token, other=float("-inf"))
    values = tl.where(values == 0.0, 0.0, values)  # -0.0 equals 0.0, and has other bits
    bits = values.to(tl.int32, bitcast=True)
    # Of negative numbers, the one with the larger bits is the smaller.
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    both = (ordered << 32) | (LOW_BITS - ids.to(tl.int64))
    highest_keys = _find_largest(tl.where(is_token, both, NO_KEY), LOG_BLOCK, LOG_CANDIDATES, False)
    place = row * NUM_BLOCKS + block
    tl.store(keys + place * CANDIDATES + tl.arange(0, CANDIDATES), highest_keys)

    highest = tl.max(values, 0)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(sums + row * 2 * NUM_BLOCKS + block, highest)
    tl.store(sums + row * 2 * NUM_BLOCKS + NUM_BLOCKS + block, tl.sum(tl.exp(values - finite), 0))


@triton.jit(do_not_specialize=["table_stride", "size"])
def _draw(
    keys,
    sums,
    table,
    out,
    table_stride,
    size,
    vocab,
    NUM_BLOCKS: tl.constexpr,
    LOG_BLOCKS: tl.constexpr,
    LOG_CANDIDATES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One row: draws its token, and advances its column of the table [rows, size] float64.

    Args:
        out: [steps, 4, size] float64, written at [AT]: token ids, their log-probabilities, and the points and widths
            of the codes after the draw.
    """
    MAX_BLOCKS: tl.constexpr = 2**LOG_BLOCKS
    CANDIDATES: tl.constexpr = 2**LOG_CANDIDATES
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, MAX_BLOCKS)
    is_block = blocks < NUM_BLOCKS
    if IS_DEPENDENT:
        gdc_wait()
    highests = tl.load(sums + row * 2 * NUM_BLOCKS + blocks, mask=is_block, other=float("-inf"))
    totals = tl.load(sums + row * 2 * NUM_BLOCKS + NUM_BLOCKS + blocks, mask=is_block, other=0.0)
    highest = tl.max(highests, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    # A block of which all logits are -inf has a sum of 0.
    log_total = highest + tl.log(tl.sum(totals * tl.exp(highests - highest), 0))

    # The candidates of a block are in descending order; those of every other block are read in reverse.
    candidate = tl.arange(0, CANDIDATES)[None, :]
    is_reversed = (blocks[:, None] % 2 == 0) & (NUM_BLOCKS > 1)
    in_turn = tl.where(is_reversed, CANDIDATES - 1 - candidate, candidate)
    places = (row * NUM_BLOCKS + blocks[:, None]) * CANDIDATES + in_turn
    found = tl.load(keys + places, mask=is_block[:, None], other=NO_KEY)
    best = _find_largest(found, LOG_BLOCKS + LOG_CANDIDATES, LOG_CANDIDATES, True)
    candidates = tl.arange(0, CANDIDATES)
    is_candidate = candidates < vocab
    ids = LOW_BITS - (best & LOW_BITS)
    ordered = (best >> 32).to(tl.int32)
    values = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    values = tl.where(is_candidate, values, float("-inf"))

    column = table + row
    temperature = tl.load(column + TEMPERATURE * table_stride)
    top_k = tl.load(column + TOP_K * table_stride)
    top_p = tl.load(column + TOP_P * table_stride)
    point = tl.load(column + POINT * table_stride)
    is_greedy = temperature == 0.0

    scores = values.to(tl.float64) / tl.where(is_greedy, 1.0, tl.maximum(temperature, MIN_TEMPERATURE))
    scores = tl.where(candidates.to(tl.float64) < top_k, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 0))
    probs = weights / tl.sum(weights, 0)
    probs = tl.where(tl.cumsum(probs, 0) - probs < top_p, probs, 0.0)
    cumulative = tl.cumsum(probs, 0)
    total = tl.sum(tl.where(candidates == CANDIDATES - 1, cumulative, 0.0), 0)
    target = point * total
    choice = tl.sum((cumulative <= target).to(tl.int32), 0)
    last = tl.max(tl.where(probs > 0, candidates, 0), 0)  # rounding must not step past the end
    choice = tl.where(is_greedy, 0, tl.minimum(choice, last))

    is_choice = candidates == choice
    interval = tl.sum(tl.where(is_choice, probs, 0.0), 0)
    low = tl.sum(tl.where(is_choice, cumulative, 0.0), 0) - interval
    inside = tl.minimum(tl.maximum((target - low) / interval, 0.0), 1.0)

    token = tl.sum(tl.where(is_choice, ids, 0), 0)
    # Not a number or not, the token is one of the vocabulary's.
    token = tl.minimum(token, vocab - 1)
    logprob = tl.max(tl.where(is_choice, values, float("-inf")), 0) - log_total
    at = tl.load(column + AT * table_stride)
    drawn = out + at.to(tl.int64) * 4 * size + row
    tl.store(drawn, token.to(tl.float64))
    tl.store(drawn + size, logprob.to(tl.float64))

    moves = tl.load(column + MOVES * table_stride)
    position = tl.load(column + POSITION * table_stride)
    tl.store(column + ID * table_stride, token.to(tl.float64))
    tl.store(column + POSITION * table_stride, position + moves)
    tl.store(column + AT * table_stride, at + moves)

    width = tl.load(column + WIDTH * table_stride)
    next_point = tl.load(column + (NEXT_POINTS + at.to(tl.int64)) * table_stride)
    width = tl.where(is_greedy, width, width * interval / total)
    point = tl.where(is_greedy, point, tl.where(width < MIN_WIDTH, next_point, inside))
    tl.store(drawn + 2 * size, point)
    tl.store(drawn + 3 * size, width)
    tl.store(column + POINT * table_stride, point)
    tl.store(column + WIDTH * table_stride, width)


FIND_CANDIDATES = Kernel(_find_candidates, num_warps=8)
DRAW = Kernel(_draw, num_warps=8)
