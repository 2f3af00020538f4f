"""Drawing tokens from logits: candidates, temperature, top-k, top-p, log-probabilities, and the next step's input.

The draw itself is `sampling.pick`'s, number by number in its order, in float64. What differs is how the candidates are
found: a kernel needs at most NUM_CANDIDATES of them, which a threshold selects without sorting the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from workers.engine.cpu.kernel_source.attention import LOWEST, largest
from workers.engine.cpu.kernel_source.exponential import exp, exp_floats
from workers.engine.cpu.kernel_source.ir import (
    FAST,
    FAST_MATH,
    KERNEL,
    atomic_add,
    const_floats,
    emits,
    floats,
    load_floats,
    loop,
    plus,
    record,
    records,
    splat,
    store_vector,
    times,
)
from workers.engine.cpu.kernel_source.partition import claim
from workers.engine.cpu.layouts import (
    CALL,
    DRAW,
    LANES,
    MIN_WIDTH,
    NUM_CANDIDATES,
    NUM_GROUPS,
    ROW,
    SAMPLER,
    SAMPLER_SCRATCH,
    STEP,
    VECTOR,
)

_f32, _f64, _i32, _i64 = np.float32, np.float64, np.int32, np.int64
_DRAW_BYTES = DRAW.itemsize


@emits(types.none(types.int64, types.int64, types.float32, types.int64))
def _sum_exp(builder: Any, numbers: Any, pieces: Any, most: Any, sums: Any) -> None:
    """sums[l] = Σ over pieces p, ascending, of exp(numbers[p, l] − most), float32; numbers [pieces ≥ 1, LANES]."""
    most = splat(builder, most)
    offsets = [4 * first for first in range(0, LANES, VECTOR)]

    def body(piece: Any, before: list[Any]) -> list[Any]:
        place = plus(builder, numbers, times(builder, piece, 4 * LANES))
        vectors = [load_floats(builder, plus(builder, place, offset)) for offset in offsets]
        powers = [exp_floats(builder, builder.fsub(vector, most)) for vector in vectors]
        return [builder.fadd(*pair) for pair in zip(before, powers, strict=True)]

    totals = loop(builder, pieces, [const_floats(0.0) for _ in offsets], body)
    for total, offset in zip(totals, offsets, strict=True):
        store_vector(builder, total, plus(builder, sums, offset))


@njit(**FAST)
def _log_sum_exp(logits: int, vocab: int, most: Any, sums: int) -> float:
    """log Σ exp(logits[i]); `most` is the largest logit.

    Order: LANES chains in float32 over the whole pieces of LANES; then, in float64, the chains and the rest of the
    logits, ascending.
    """
    total = 0.0
    pieces = vocab // LANES
    if pieces > 0:
        _sum_exp(logits, pieces, most, sums)
        chains = floats(sums, LANES)
        for lane in range(LANES):
            total += chains[lane]
    rest = floats(logits + 4 * LANES * pieces, vocab - LANES * pieces)
    for i in range(len(rest)):
        total += exp(rest[i] - most)
    return float(most) + math.log(total)


@njit(**FAST_MATH)
def _group_maxima(logits: Any, maxima: Any) -> None:
    """maxima[g] = max of logits[i], i ≡ g modulo NUM_GROUPS; LOWEST for an empty group."""
    vocab = len(logits)
    for i in range(NUM_GROUPS):
        maxima[i] = _f32(LOWEST)
    for first in range(0, vocab, NUM_GROUPS):
        piece = logits[first : min(first + NUM_GROUPS, vocab)]
        for i in range(len(piece)):
            maxima[i] = max(maxima[i], piece[i])


@njit(inline="always", **FAST)
def _sortable(bits: Any) -> Any:
    """A float32's bits as an int32 of the same order; the function is its own inverse."""
    return bits ^ ((bits >> 31) & _i32(0x7FFFFFFF))


@njit(**FAST)
def _threshold(numbers: Any, n: int) -> Any:
    """A float32 that at least `n` of the NUM_GROUPS numbers reach, and at most ¼ n more unless numbers are equal.

    By bisection over all float32: counting takes less time than sorting.
    """
    bits = numbers.view(np.int32)
    low, high = np.int64(-(1 << 31)), np.int64((1 << 31) - 1)
    while low < high:
        middle = (low + high + 1) >> 1
        least = _i32(middle)
        count = _i32(0)
        for i in range(NUM_GROUPS):
            count += _i32(_sortable(bits[i]) >= least)
        if count >= n:
            low = middle
            if count <= n + n // 4:
                break
        else:
            high = middle - 1
    return _i32(_sortable(_i32(low))).view(np.float32)


@njit(**FAST)
def _insert(value: Any, token: int, values: Any, ids: Any, number: int) -> int:
    """Inserts a token into the `number` candidates, likeliest first, equal ones by id; returns their new number."""
    last = number
    if number == NUM_CANDIDATES:
        last = number - 1
        if value < values[last] or (value == values[last] and token > ids[last]):
            return number
    while last > 0 and (values[last - 1] < value or (values[last - 1] == value and ids[last - 1] > token)):
        values[last], ids[last] = values[last - 1], ids[last - 1]
        last -= 1
    values[last], ids[last] = value, token
    return min(number + 1, NUM_CANDIDATES)


@njit(**FAST)
def _candidates(logits: Any, maxima: Any, values: Any, ids: Any) -> int:
    """The NUM_CANDIDATES likeliest tokens into `values` and `ids`, likeliest first, equal ones by id; returns how many.

    At least NUM_CANDIDATES groups have a maximum that reaches the threshold, so all candidates reach it.
    """
    vocab = len(logits)
    threshold = _threshold(maxima, min(NUM_CANDIDATES, vocab))
    number = 0
    for group in range(min(NUM_GROUPS, vocab)):
        if maxima[group] < threshold:
            continue
        for token in range(group, vocab, NUM_GROUPS):
            if logits[token] >= threshold:
                number = _insert(logits[token], token, values, ids, number)
    return number


@njit(**FAST)
def _allowed_candidates(logits: Any, most: Any, draw: Any, values: Any, ids: Any) -> int:
    """As `_candidates`, of the tokens that the draw's constraint allows; `most` is the largest logit of all tokens."""
    num_allowed = draw.num_allowed
    num_listed = num_allowed + draw.num_if_likeliest
    listed = records(draw.allowed_at, num_listed, np.int32)
    number = 0
    for i in range(num_listed):
        token = _i64(listed[i])
        if i < num_allowed or logits[token] >= most:
            number = _insert(logits[token], token, values, ids, number)
    return number


@njit(**FAST)
def _pick(values: Any, number: int, draw: Any, probs: Any) -> int:
    """The index of the chosen candidate, and the draw's next code: `sampling.pick` in its order of operations, float64.

    p[i] = exp((v[i] − v[0]) / temperature) / Σ of these over the top_k first
    the candidates before which Σ p < top_p are kept; the result is the first i with Σ p[0…i] > point · Σ p[kept]
    """
    temperature = draw.temperature
    if temperature == 0:
        return int(draw.rank)
    kept = number if draw.top_k > number else _i64(draw.top_k)
    total = 0.0
    for i in range(kept):
        probs[i] = math.exp((_f64(values[i]) - _f64(values[0])) / temperature)  # `float` would leave them float32
        total += probs[i]
    mass, end, top_p = 0.0, 0, draw.top_p
    for i in range(kept):
        if i > 0 and mass >= top_p:  # the first is always kept
            break
        mass += probs[i] / total
        end = i + 1
    target, after = draw.point * mass, 0.0
    choice = end - 1
    for i in range(end):
        after += probs[i] / total
        if after > target or after == mass:  # rounding must not step past the end
            choice = i
            break
    interval = probs[choice] / total
    draw.width = draw.width * interval / mass
    if draw.width < MIN_WIDTH:
        draw.point = draw.next_point
    else:
        draw.point = min(max((target - (after - interval)) / interval, 0.0), 1.0)
    return choice


@cfunc(KERNEL, **FAST)
def sample(call_at: int, thread: int) -> None:
    """Each draw's token, unless it has one, and log-probability: logits[token] − log Σ exp(logits); an item is a draw.

    logits [rows, vocab] float32 are not changed; candidates are ordered by logit, equal ones by token id. Where
    logits are not numbers, the token is valid and its log-probability is NaN.
    The call has a SAMPLER in `step_at` and the logits in `product_at`.
    """
    call = record(call_at, CALL)
    sampler = record(call.step_at, SAMPLER)
    num_draws, vocab = sampler.num_draws, sampler.vocab_size
    draws = records(sampler.draws_at, num_draws, DRAW)
    scratch = sampler.scratch_at + 4 * thread * SAMPLER_SCRATCH
    maxima, sums = floats(scratch, NUM_GROUPS), scratch + 4 * NUM_GROUPS
    candidates = sums + 4 * LANES  # np.empty would need numba's allocator
    ids = records(candidates, NUM_CANDIDATES, np.int64)
    probs = records(candidates + 8 * NUM_CANDIDATES, NUM_CANDIDATES, np.float64)
    values = floats(candidates + 16 * NUM_CANDIDATES, NUM_CANDIDATES)
    turn = 0
    while True:
        number, turn = claim(call_at, call, thread, turn, num_draws)
        if number >= num_draws:
            return
        draw = draws[number]
        row = call.product_at + 4 * vocab * draw.row
        logits = floats(row, vocab)
        _group_maxima(logits, maxima)
        most = largest(scratch, NUM_GROUPS)
        if draw.token_id < 0:
            if draw.num_allowed > 0:
                num_candidates = _allowed_candidates(logits, most, draw, values, ids)
            else:
                num_candidates = _candidates(logits, maxima, values, ids)
            choice = _pick(values, num_candidates, draw, probs) if num_candidates > 0 else 0
            if choice >= num_candidates:  # NaN is no candidate
                draw.token_id, draw.logprob = 0, math.nan
                continue
            draw.token_id = ids[choice]
        draw.logprob = float(logits[draw.token_id]) - _log_sum_exp(row, vocab, most, sums)


@cfunc(KERNEL, **FAST)
def advance(call_at: int, _thread: int) -> None:
    """Makes each row the row of the token that was drawn from it, and the next draws those of the next step, with the
    codes that these leave.

    Draw i is row i's. Sets the interrupt flag if a token is the end-of-text token.
    The call has a STEP, the flag's address in `layer_at`, and the SAMPLER in `product_at`.
    """
    call = record(call_at, CALL)
    step, sampler = record(call.step_at, STEP), record(call.product_at, SAMPLER)
    num_rows = step.num_rows
    draws, rows = records(sampler.draws_at, 2 * num_rows, DRAW), records(step.rows_at, num_rows, ROW)
    for number in range(num_rows):
        row, draw, following = rows[number], draws[number], draws[num_rows + number]
        following.point, following.width = draw.point, draw.width
        row.token_id = draw.token_id
        if row.token_id == step.end_id:
            atomic_add(call.layer_at, 1)
        row.position += 1
        row.num_in_suffix += 1
    sampler.draws_at += _DRAW_BYTES * num_rows
