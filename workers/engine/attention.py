"""Causal attention over a cache, with sums that run in one fixed order.

Knows queries, keys, values, and which rows share a prompt. Refuses to know sequences and why.

The promise "same seed, same text, whatever else happens" needs a row's attention to have the same
bits whether its token was typed or generated, whatever is computed beside it, and wherever the
keys and values that it sees are kept. So:

- A score is a chain of fused multiply-adds over the head's width, and a sum over positions is such
  a chain from the first position to the last: that is how a matrix kernel computes an element,
  however many of them. Kernels depart from it for very few rows (a lone row is summed as a dot
  product), for a handful of columns, and past some hundred summands (the chain is cut to fit their
  caches). So rows are padded to `min_rows`, columns to a multiple of `COLUMNS`, and sums are cut,
  by us, every `BLOCK` positions.
- A position that a row may not see has weight 0, and a chain passes over zeros unchanged.
- A chain can be broken off and taken up again: what came before is one more summand, of weight 1,
  put before the rest. So branches share the keys and values of their prompt, one copy in one place,
  and each has a tail of its own, whose first position is kept for that summand.
- The softmax's denominator is a chain too: a column of ones beside the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 16
BLOCK = 256


def value_width(head_size: int) -> int:
    """Width of a cached value: the head's, the column of ones, and zeros to a multiple of 16."""
    return (head_size // COLUMNS + 1) * COLUMNS


def padded_columns(number: int) -> int:
    """`number` rounded up to a multiple of COLUMNS."""
    return -(-number // COLUMNS) * COLUMNS


def agreeing_min_rows(num_heads: int, head_size: int) -> int | None:
    """The fewest rows whose products have the bits that more rows' have, on this machine.

    None if there is no such number: then the promise does not hold here.
    """
    generator = torch.Generator().manual_seed(0)
    most = 64
    query = torch.randn(num_heads, most, head_size, generator=generator)
    keys = torch.randn(num_heads, head_size, BLOCK, generator=generator)
    weights = torch.rand(num_heads, most, BLOCK, generator=generator)
    values = torch.randn(num_heads, BLOCK, value_width(head_size), generator=generator)

    def agrees(rows: int) -> bool:
        reference = torch.bmm(query, keys)
        for columns in (COLUMNS, 5 * COLUMNS, BLOCK):
            scores = torch.bmm(query[:, :rows], keys[:, :, :columns])
            if not torch.equal(scores, reference[:, :rows, :columns]):
                return False
            hidden = weights.clone()
            hidden[:, :, columns:] = 0
            sums = torch.bmm(weights[:, :rows, :columns].contiguous(), values[:, :columns])
            if not torch.equal(sums, torch.bmm(hidden, values)[:, :rows]):
                return False
        return True

    for rows in (3, 4, 8, 16):
        if all(agrees(more) for more in (rows, rows + 1, 2 * rows, 33)):
            return rows
    return None


def attend_chunk(query: Tensor, keys: Tensor, values: Tensor, start: int, min_rows: int) -> Tensor:
    """Attention of `rows` consecutive tokens of one prompt.

    Args:
        query: [rows, heads, head_size], scaled already.
        keys: [heads, head_size, positions], the rows' own included.
        values: [heads, positions, value_width]; column head_size holds ones, those past it zeros.
        start: the first row's position.

    Returns:
        [rows, heads · head_size].
    """
    num_rows, _, head_size = query.shape
    columns = padded_columns(start + num_rows)
    query = query.transpose(0, 1)
    if num_rows < min_rows:
        query = F.pad(query, (0, 0, 0, min_rows - num_rows))
    scores = torch.bmm(query, keys[:, :, :columns])
    hidden = torch.ones(query.shape[1], columns - start, dtype=torch.bool)
    scores[:, :, start:].masked_fill_(hidden.triu_(1), float("-inf"))
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    sums = torch.bmm(weights[:, :, :BLOCK], values[:, : min(BLOCK, columns)])
    for first in range(BLOCK, columns, BLOCK):
        last = min(first + BLOCK, columns)
        sums += torch.bmm(weights[:, :, first:last], values[:, first:last])
    sums = sums[:, :num_rows].transpose(0, 1)
    return (sums[..., :head_size] / sums[..., head_size : head_size + 1]).flatten(1)


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """Rows that continue one prompt: its place in the cache, its length, and the rows' numbers."""

    slot: int
    length: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptClass:
    """Prompts of similar length, each with (by padding) the same number of rows."""

    slots: tuple[int, ...]
    height: int  # rows of each prompt
    columns: int  # positions computed of each; a multiple of COLUMNS
    rows: Tensor | None  # [prompts · height] row numbers; None if they are 0, 1, 2 …
    mask: Tensor | None  # [prompts, 1, 1, columns], -inf past a prompt's end; None if all are full


def prompt_classes(prompts: Sequence[SharedPrompt], num_rows: int, min_rows: int) -> list[PromptClass]:
    """`prompts` in classes; all of a class have the same number of whole blocks."""
    by_length: dict[int, list[SharedPrompt]] = {}
    for prompt in prompts:
        step = BLOCK // 4 if prompt.length <= BLOCK else BLOCK // 2
        by_length.setdefault(-(-prompt.length // step) * step, []).append(prompt)
    classes = []
    for group in by_length.values():
        height = max(min_rows, *(len(prompt.rows) for prompt in group))
        columns = padded_columns(max(prompt.length for prompt in group))
        # A prompt that is short of rows has its first one computed again.
        rows = [row for prompt in group for row in (*prompt.rows, *prompt.rows[:1] * (height - len(prompt.rows)))]
        mask = None
        if any(prompt.length < columns for prompt in group):
            lengths = torch.tensor([prompt.length for prompt in group])
            mask = _additive(torch.arange(columns) < lengths[:, None])[:, None, None]
        classes.append(
            PromptClass(
                slots=tuple(prompt.slot for prompt in group),
                height=height,
                columns=columns,
                rows=None if rows == list(range(num_rows)) else torch.tensor(rows),
                mask=mask,
            )
        )
    return classes


@dataclass(frozen=True, slots=True)
class TailMasks:
    """What rows see of their tails in one step."""

    columns: int  # positions computed, a multiple of COLUMNS
    hidden: Tensor  # [rows, 1, columns], -inf where a row sees nothing
    next_block: Tensor | None  # [rows, 1, columns], 1 past the prompt's last block; None if nobody


def tail_masks(lengths: Sequence[int], rooms: Sequence[int]) -> TailMasks:
    """
    Args:
        lengths: of each row, the tokens in its tail, the one being computed included.
        rooms: of each row, the positions from its prompt's end to the end of that block.
    """
    columns = padded_columns(1 + max(lengths))
    column = torch.arange(columns)
    ends = torch.tensor(lengths)[:, None]
    # Position 0 is what the prompt hands over: no score.
    hidden = _additive((column > 0) & (column <= ends))[:, None]
    next_block = None
    if any(length > room for length, room in zip(lengths, rooms, strict=True)):
        next_block = (column > torch.tensor(rooms)[:, None]).float()[:, None]
    return TailMasks(columns, hidden, next_block)


def room_in_block(length: int) -> int:
    """Positions between a prompt of `length` tokens and the end of its last block."""
    return -length % BLOCK


def attend_branches(
    query: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    classes: Sequence[PromptClass],
    masks: TailMasks,
    min_rows: int,
) -> Tensor:
    """Attention of one token of each of many branches, every prompt read once for all its rows.

    Args:
        query: [rows, heads, head_size], scaled already, contiguous, and with `min_rows` heads of
            anything finite behind it in memory.
        prompt_keys: [slots, heads, head_size, positions].
        prompt_values: [slots, heads, positions, value_width].
        tail_keys: [rows, heads, positions, head_size]; the token's own is there, the first of a
            tail at position 1.
        tail_values: [rows, heads, positions, value_width]; likewise. Position 0 is written here.
        classes, masks: who sees what.

    Returns:
        [rows, heads · head_size].
    """
    rows, heads, size = query.shape
    columns = masks.columns
    # The heads that follow serve as padding rows: nobody looks at their products.
    padded_query = query.as_strided((rows * heads, min_rows, size), (size, size, 1))
    keys = tail_keys.flatten(0, 1)[:, :columns].transpose(1, 2)
    scores = torch.bmm(padded_query, keys)[:, 0].view(rows, heads, columns)
    padded_tail = query.new_zeros((rows * heads + min_rows - 1) * columns)
    tail = padded_tail[: rows * heads * columns].view(rows, heads, columns)
    torch.add(scores, masks.hidden, out=tail)
    greatest = tail.amax(-1)

    weights = [_prompt_scores(query, prompt_keys, one) for one in classes]
    for one, theirs in zip(classes, weights, strict=True):
        peaks = theirs.amax(-1).transpose(1, 2).flatten(0, 1)
        if one.rows is None:
            greatest = torch.maximum(greatest, peaks)
        else:
            greatest[one.rows] = torch.maximum(greatest[one.rows], peaks)

    open_sums = query.new_empty(0)  # [rows, heads, value_width], of each prompt's last block
    done_sums: Tensor | None = None  # the same, of the blocks before; None if there are none
    for one, theirs in zip(classes, weights, strict=True):
        peaks = greatest if one.rows is None else greatest[one.rows]
        peaks = peaks.view(len(one.slots), one.height, heads).transpose(1, 2)
        theirs.sub_(peaks[..., None]).exp_()
        *done, last = _prompt_sums(theirs, prompt_values, one)
        open_sums = _put(open_sums, last, one, rows)
        if done:
            total = done[0]
            for more in done[1:]:
                total = total + more
            done_sums = _put(done_sums, total, one, rows)

    values = tail_values.flatten(0, 1)[:, :columns]
    values[:, 0] = open_sums.flatten(0, 1)
    tail.sub_(greatest[..., None]).exp_()
    tail[..., 0] = 1
    shape, strides = (rows * heads, min_rows, columns), (columns, columns, 1)
    after = None
    if masks.next_block is not None:
        padded_after = padded_tail.clone()
        padded_after[: tail.numel()].view_as(tail).mul_(masks.next_block)
        after = torch.bmm(padded_after.as_strided(shape, strides), values)[:, 0]
        tail.mul_(1 - masks.next_block)
    sums = torch.bmm(padded_tail.as_strided(shape, strides), values)[:, 0]
    if done_sums is not None:
        sums = done_sums.flatten(0, 1) + sums
    if after is not None:
        sums = sums + after
    return (sums[:, :size] / sums[:, size : size + 1]).view(rows, heads * size)


def _prompt_scores(query: Tensor, keys: Tensor, one: PromptClass) -> Tensor:
    """[prompts, heads, height, columns]; -inf past a prompt's end."""
    own = query if one.rows is None else query[one.rows]
    scores = query.new_empty(len(one.slots), query.shape[1], one.height, one.columns)
    for number, slot in enumerate(one.slots):
        rows = own[number * one.height : (number + 1) * one.height].transpose(0, 1)
        torch.bmm(rows, keys[slot, :, :, : one.columns], out=scores[number])
    return scores if one.mask is None else scores.add_(one.mask)


def _prompt_sums(weights: Tensor, values: Tensor, one: PromptClass) -> list[Tensor]:
    """Of each block, [prompts, heads, height, value_width]."""
    sums = []
    for first in range(0, one.columns, BLOCK):
        last = min(first + BLOCK, one.columns)
        block = weights.new_empty(*weights.shape[:3], values.shape[-1])
        for number, slot in enumerate(one.slots):
            theirs = weights[number, :, :, first:last]
            torch.bmm(theirs, values[slot, :, first:last], out=block[number])
        sums.append(block)
    return sums


def _put(target: Tensor | None, values: Tensor, one: PromptClass, num_rows: int) -> Tensor:
    """`target` [rows, heads, width] with the class's `values` [prompts, heads, height, width]."""
    values = values.transpose(1, 2).flatten(0, 1)
    if one.rows is None:
        return values
    if target is None or target.numel() == 0:
        target = values.new_zeros(num_rows, *values.shape[1:])
    target[one.rows] = values
    return target


def _additive(visible: Tensor) -> Tensor:
    """0 where `visible`, -inf elsewhere."""
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
