"""The operations of a decode step that have more than one implementation, and their plain torch version.

`TorchKernels` runs on any device, is what the Triton kernels are compared with, and serves where they do not. Knows
tensors, KV slots and the layout of a batch's table. Does not know sequences, graphs and which implementation is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.draw import NUM_CANDIDATES
from workers.engine.model.transformer import Linear, Norm
from workers.engine.sampling import pick

ROWS_AT_ONCE = 8  # of attention in plain torch
# Decode steps that can be launched together: a table has their next code points.
MAX_STEPS = 16

# Rows of a batch's table, a column for each sequence; the rows before TEMPERATURE are integers:
# ID of the newest token; START, the number of tokens in the entry; ENTRY, the entry's first slot; SUFFIX, the suffix's
# first slot - START; MOVES, by how much POSITION and AT grow each step (0 for padding); POSITION of the newest token.
# POINT and WIDTH: the arithmetic code of the next draw. AT: which of the NEXT_POINTS may replace the point after it.
ID, START, ENTRY, SUFFIX, MOVES, POSITION, TEMPERATURE, TOP_K, TOP_P, POINT, WIDTH, AT, NEXT_POINTS = range(13)
TABLE_ROWS = NEXT_POINTS + MAX_STEPS


class StepKernels(Protocol):
    """What a decode step computes between its matrix products."""

    def begin(self, table: Tensor, token_embedding: Tensor, position_embedding: Tensor | None) -> Tensor:
        """The start of a step: the embedded tokens, [sequences, n_embd].

        Args:
            table: [TABLE_ROWS, sequences] float64.
            token_embedding: [vocab, n_embd].
            position_embedding: [n_positions, n_embd]; None: positions are not embedded.
        """

    def multiply(self, product: Product, x: Tensor, y: Tensor | None) -> Tensor:
        """As `multiply`, the function, but `x` may lack what was added until the next product with a norm."""

    def has_equal_products(self, dtype: torch.dtype) -> bool:
        """Whether a row's products have the same bits alone and in batches of up to 48 rows."""

    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        """Stores the keys and values of each sequence's new token, and attends to it and all tokens before.

        Args:
            attention: what precedes it.
            qkv: [sequences, (heads + 2 · KV heads) · head_size] queries (scaled), keys and values.
            slots: [slots, 2, KV heads, head_size], the KV slots of one layer.
            table: as `begin` got it.

        Returns:
            [sequences, heads · head_size].
        """

    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        """Draws the next tokens, and advances the table to the step after: ID, POSITION, POINT, WIDTH and AT.

        Of equal logits the smaller id precedes. Draws need at most NUM_CANDIDATES candidates.

        Args:
            logits: [sequences, vocab] float32; its rows may be padded (`stride(0)` ≥ vocab).
            table: [TABLE_ROWS, sequences] float64.
            out: [steps, 4, sequences] float64. For each sequence, out[AT] becomes the token id, its log-probability
                under the model's own distribution, and the point and width of the code after the draw.
        """


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer with what precedes and follows it.

    Attributes:
        norm: norm of the residual stream, which is then the input.
        activate: applied to the result, element by element.
        is_added: the result is added to the residual stream.
    """

    linear: Linear
    norm: Norm | None = None
    activate: Callable[[Tensor], Tensor] | None = None
    is_added: bool = False


def multiply(product: Product, x: Tensor, y: Tensor | None) -> Tensor:
    """A product in plain torch.

    Args:
        x: [rows, n_embd], the residual stream; changed in place if the product is added to it.
        y: [rows, in], the input of a product without a norm.

    Returns:
        [rows, out]; x if the product is added to it.
    """
    source = y if product.norm is None else product.norm(x)
    assert source is not None
    out = product.linear(source)
    if product.activate is not None:
        out = product.activate(out)
    if product.is_added:
        return x.add_(out)
    return out


@dataclass(frozen=True, slots=True)
class Attention:
    """What precedes attention: norms of each head's query and key, and rotary positions; None: there are none.

    Attributes:
        rotations: [n_positions, 2, head_size / 2] float32, cosines and sines.
    """

    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotations: Tensor | None = None

    def split(self, qkv: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [rows, heads, head_size], and keys and values [rows, 2, KV heads, head_size], as `slots` have them.

        Args:
            qkv: [rows, (heads + 2 · KV heads) · head_size].
            positions: [rows] positions of the tokens.
        """
        num_kv_heads, head_size = slots.shape[-2:]
        queries, keys_values = qkv.view(len(qkv), -1, head_size).tensor_split((-2 * num_kv_heads,), 1)
        keys_values = keys_values.view(len(qkv), 2, num_kv_heads, head_size)
        if self.query_norm is None and self.rotations is None:
            return queries, keys_values
        keys, values = keys_values.unbind(1)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if self.rotations is not None:
            cosines, sines = self.rotations[positions][:, None].unbind(2)
            queries, keys = _rotate(queries, cosines, sines), _rotate(keys, cosines, sines)
        return queries, torch.stack((keys, values), 1)


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates number i of each head with number i + head_size / 2, in float32; [rows, heads, head_size]."""
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1).to(heads.dtype)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the tokens of a step's sequences are.

    Attributes:
        table: what the others are computed from.
        positions: [sequences] positions of the new tokens.
        writes: [sequences] KV slots of the new tokens.
        reads: [sequences, length] KV slots of all tokens; of those that a sequence does not have, the new token's.
        is_hidden: [sequences, 1, 1, length] which of them a sequence does not have.
    """

    table: Tensor
    positions: Tensor
    writes: Tensor
    reads: Tensor
    is_hidden: Tensor

    @classmethod
    def of(cls, table: Tensor, length: int) -> _Places:
        integers = table[:TEMPERATURE].long()
        start, entry, suffix = integers[START : SUFFIX + 1, :, None]
        position = integers[POSITION, :, None]
        place = torch.arange(length, device=integers.device)
        is_hidden, newest = place > position, suffix + position
        reads = torch.where(is_hidden, newest, place + torch.where(place < start, entry, suffix))
        return cls(table, position[:, 0], newest[:, 0], reads, is_hidden[:, None, None])


class TorchKernels:
    """`StepKernels` in plain torch: many small kernels on a GPU, and the meaning of all others."""

    def __init__(self, length: int) -> None:
        """
        Args:
            length: `attend` reads this many tokens of each sequence, and ignores those that it does not have.
        """
        self._length = length
        self._places: _Places | None = None  # of the step that is being computed

    def begin(self, table: Tensor, token_embedding: Tensor, position_embedding: Tensor | None) -> Tensor:
        self._places = _Places.of(table, self._length)  # once for all layers
        ids, positions = table[ID].long(), table[POSITION].long()
        return embed(ids, positions, token_embedding, position_embedding)

    def multiply(self, product: Product, x: Tensor, y: Tensor | None) -> Tensor:
        return multiply(product, x, y)

    def has_equal_products(self, dtype: torch.dtype) -> bool:
        return False

    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        places = self._places
        if places is None or places.table is not table:
            places = _Places.of(table, self._length)
        queries, keys_values = attention.split(qkv, slots, places.positions)
        slots.index_copy_(0, places.writes, keys_values)
        out = torch.empty_like(queries)
        # A few rows at once, as this copies what it reads, and a CUDA graph keeps the memory of the copies.
        for at in range(0, len(qkv), ROWS_AT_ONCE):
            rows = slice(at, at + ROWS_AT_ONCE)
            keys, values = slots[places.reads[rows]].float().permute(2, 0, 3, 1, 4)  # [rows, KV heads, length, size]
            # [rows, KV heads, queries of each, head_size]
            own = queries[rows].float().view(len(keys), keys.shape[1], -1, keys.shape[3])
            weights = (own @ keys.mT).masked_fill(places.is_hidden[rows], float("-inf")).softmax(-1)
            out[rows] = (weights @ values).view(out[rows].shape)
        return out.view(len(qkv), -1)

    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        next_points = table[NEXT_POINTS:].gather(0, table[AT].long()[None])
        drawn = draw(logits, table[TEMPERATURE:POINT], torch.cat((table[POINT:AT], next_points)))
        out.scatter_(0, table[AT].long().expand(1, 4, -1), drawn[None])
        table[ID] = drawn[0]
        table[POINT:AT] = drawn[2:]
        for moving in (POSITION, AT):
            table[moving] += table[MOVES]


def embed(token_ids: Tensor, positions: Tensor, token_embedding: Tensor, position_embedding: Tensor | None) -> Tensor:
    """[rows] token ids and positions → [rows, n_embd]."""
    x = F.embedding(token_ids, token_embedding)
    return x if position_embedding is None else x + F.embedding(positions, position_embedding)


def draw(logits: Tensor, limits: Tensor, codes: Tensor) -> Tensor:
    """Draws tokens that need at most NUM_CANDIDATES candidates: the same tokens as `sampling.sample`.

    Args:
        logits: [rows, vocab] float32.
        limits: [3, rows] float64, as `SamplingParams.limits`, but with a temperature of 0 for greedy draws.
        codes: [3, rows] float64: the point and the width of each row's code, and its next point, as `pick`.

    Returns:
        [4, rows] float64: token ids, their log-probabilities under the model's own distribution, and the points and
        widths of the codes after the draw.
    """
    values, ids = _find_candidates(logits)
    is_greedy = limits[0] == 0
    temperature = torch.where(is_greedy, 1.0, limits[0])
    sampled, after = pick(values, ids, torch.cat((temperature[None], limits[1:], codes)))
    token_ids = torch.where(is_greedy, ids[:, 0], sampled)
    chosen = logits.gather(1, token_ids[:, None])[:, 0] - torch.logsumexp(logits, -1)
    return torch.stack((token_ids.double(), chosen.double(), *torch.where(is_greedy, codes[:2], after)))


def _find_candidates(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, [rows, candidates] logits and ids, and of equal logits the smaller id first.

    `topk` leaves the order of equal values open, so it compares keys that differ: the logit's bits, then the id's.
    """
    num_tokens = logits.shape[1]
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)  # -0.0 equals 0.0, and has other bits
    # Of negative numbers, the one with the larger bits is the smaller.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) + torch.arange(num_tokens - 1, -1, -1, device=logits.device)
    highest, _ = keys.topk(min(NUM_CANDIDATES, num_tokens))
    ids = num_tokens - 1 - (highest & 0xFFFFFFFF)
    return logits.gather(1, ids), ids
