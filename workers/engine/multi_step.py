"""How many decode steps a sequence may take in one multi-step decode, and for how long.

Plain Python: does not know tensors and devices.
"""

from __future__ import annotations

from workers.engine.batch import BatchRow
from workers.engine.kv_copies import SUFFIX_TOKENS
from workers.engine.result_stream import MAX_DELIVERY_DELAY_S, NUM_DELIVERED_SINGLY
from workers.engine.sequence import Sequence

# Longest time of one multi-step decode. If nothing interrupts it, the watchdog, deadlines and new sequences wait.
MAX_MULTI_STEP_S = 0.05


def num_left(row: BatchRow) -> int:
    """Decode steps until the row's sequence may end: it has `max_new_tokens`, or its KV suffix is full."""
    if row.sequence.request.sampling.min_logprob is not None:
        return 1
    num_new = row.sequence.request.sampling.max_new_tokens - row.sequence.num_new
    return min(num_new, SUFFIX_TOKENS - row.suffix_length)


def multi_step_budget_s(sequence: Sequence, now: float) -> float:
    """How long a multi-step decode that includes `sequence` may take; 0 for a single step.

    Args:
        now: `time.monotonic()` seconds.
    """
    request = sequence.request
    budget_s = MAX_MULTI_STEP_S
    if request.deadline is not None:
        budget_s = min(budget_s, request.deadline - now)
    if request.sampling.stop or request.sampling.single_line:
        budget_s = min(budget_s, MAX_DELIVERY_DELAY_S)  # steps after a stop string are computed for nothing
    if request.stream:
        is_batched = len(sequence.token_ids) >= NUM_DELIVERED_SINGLY
        budget_s = min(budget_s, MAX_DELIVERY_DELAY_S if is_batched else 0.0)
    return budget_s
