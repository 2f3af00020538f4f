"""The device's side of a step: a plan in, tokens out.

Knows the model, the cache and the sampler. Refuses to know why it is this plan and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.attention import (
    BLOCK,
    PromptClass,
    SharedPrompt,
    TailMasks,
    agreeing_min_rows,
    attend_branches,
    attend_chunk,
    prompt_classes,
    room_in_block,
    tail_masks,
    value_width,
)
from workers.engine.gpt2 import LoadedModel
from workers.engine.kv_cache import CacheShape, KVCache, TailPlace, cache_budget_bytes
from workers.engine.plan import Chunk, Plan, Row
from workers.engine.sampling import Draw, sample, token_logprobs
from workers.engine.sequence import Sequence, Step, TopLogprobs

log = logging.getLogger(__name__)

SAFE_MIN_ROWS = 4


@dataclass(frozen=True, slots=True)
class Output:
    """What a plan gave."""

    steps: list[tuple[Sequence, Step]]
    # Where they are wanted: log-probabilities of the prompt's tokens that follow a chunk's.
    echoes: list[tuple[Sequence, list[tuple[float, TopLogprobs]]]]


class ModelRunner:
    """Runs a model on the CPU, from one thread."""

    def __init__(self, loaded: LoadedModel, num_tails: int) -> None:
        """
        Args:
            num_tails: sequences that can run at once.

        Raises:
            MemoryError: if the free memory is too small for their keys and values.
        """
        config = loaded.config
        self._model = loaded.model
        self._num_heads, self._head_size = config.n_head, config.head_size
        shape = CacheShape(config.n_layer, config.n_head, config.head_size, config.n_positions)
        self.num_slots = shape.num_slots(cache_budget_bytes(), num_tails)
        self._cache = KVCache(shape, self.num_slots, num_tails)
        log.info(
            "cache: %d prompts of %d tokens and %d tails, %d MiB at most",
            *(self.num_slots, config.n_positions, num_tails, self._cache.num_bytes >> 20),
        )
        self._kept_logits: dict[int, Tensor] = {}  # slot → [vocab], after its prompt
        self._layout: _Layout | None = None
        min_rows = agreeing_min_rows(config.n_head, config.head_size)
        if min_rows is None:
            log.warning(
                "on this machine a product's last bits depend on its shape: the same seed may "
                "give another text in other company"
            )
        self._min_rows = min_rows or SAFE_MIN_ROWS

    @torch.inference_mode()
    def run(self, plan: Plan) -> Output:
        """Carries out a plan."""
        for copy in plan.copies:
            self._cache.copy(copy)
        hidden = self._hidden(plan) if plan.rows or plan.chunks else torch.empty(0)
        return Output(self._draw(plan, hidden), self._echo(plan, hidden))

    def _hidden(self, plan: Plan) -> Tensor:
        """[rows + tokens of all chunks (+ padding), n_embd], in this order."""
        ids = [row.sequence.token_ids[-1] for row in plan.rows]
        positions = [row.position for row in plan.rows]
        for chunk in plan.chunks:
            ids += chunk.prompt.tokens[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
        padding = self._model.padded_rows(len(ids)) - len(ids)
        attend = _Attention(self._cache, plan.chunks, padding, self._min_rows)
        if plan.rows:
            attend.add_rows(self._layout_of(plan.rows), plan.rows)
        table = torch.tensor([ids + [0] * padding, positions + [0] * padding])
        return self._model.hidden(table[0], table[1], attend)

    def _layout_of(self, rows: Items[Row]) -> _Layout:
        """The last step's, if these are the same rows and none has moved."""
        key = tuple((row.slot.index, row.start, row.tail) for row in rows)
        if self._layout is None or self._layout.key != key:
            self._layout = _Layout(key, self._cache, self._min_rows)
        return self._layout

    def _draw(self, plan: Plan, hidden: Tensor) -> list[tuple[Sequence, Step]]:
        """A token for each who gets one."""
        wanted = list(range(len(plan.rows)))
        sources = list(wanted)  # of each draw, its row of the logits
        end = len(plan.rows)
        kept = []
        for chunk in plan.chunks:
            end += chunk.stop - chunk.start
            if chunk.is_last:
                kept.append((chunk.slot.index, len(wanted)))
                sources += [len(wanted)] * len(chunk.prompt.members)
                wanted.append(end - 1)
        pieces = [self._model.logits(hidden[wanted])] if wanted else []
        for row in plan.ready:
            sources.append(len(wanted) + len(pieces) - bool(wanted))
            pieces.append(self._kept_logits[row.slot.index][None])
        # Only now: a prompt that is complete may be in the slot of one that was ready.
        for slot, number in kept:
            self._kept_logits[slot] = pieces[0][number].clone()
        if not sources:
            return []
        logits = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if sources != list(range(len(logits))):
            logits = logits[sources]
        drawn = plan.draws
        return list(zip(drawn, sample(logits, [draw_of(one) for one in drawn]), strict=True))

    def _echo(self, plan: Plan, hidden: Tensor) -> list[tuple[Sequence, list[tuple[float, TopLogprobs]]]]:
        echoes = []
        first = len(plan.rows)
        for chunk in plan.chunks:
            following = chunk.prompt.tokens[chunk.start + 1 : chunk.stop + 1]
            if chunk.prompt.is_echoed and following:
                logits = self._model.logits(hidden[first : first + len(following)])
                for member in chunk.prompt.members:
                    num_top = member.request.sampling.top_logprobs
                    echoes.append((member, token_logprobs(logits, following, num_top)))
            first += chunk.stop - chunk.start
        return echoes


@dataclass(frozen=True, slots=True)
class _TailLayer:
    keys: Tensor  # [window, heads, positions, head_size]
    values: Tensor  # [window, heads, positions, value_width]


class _Layout:
    """Where a set of rows reads; stays the same from step to step, until the set changes.

    The attention computes a window of tails, from the first in use to the last.
    """

    def __init__(self, key: tuple[tuple[int, int, int], ...], cache: KVCache, min_rows: int) -> None:
        """
        Args:
            key: (slot, start, tail) of each row, in the order of the tails.
        """
        self.key = key
        first, last = key[0][2], key[-1][2]
        self.size = last - first + 1
        self.places = [tail - first for _, _, tail in key]  # of the rows, in the window
        self.index = None if len(key) == self.size else torch.tensor(self.places)
        rows_of: dict[tuple[int, int], list[int]] = {}
        self.rooms = [BLOCK] * self.size
        for place, (slot, start, _) in zip(self.places, key, strict=True):
            rows_of.setdefault((slot, start), []).append(place)
            self.rooms[place] = room_in_block(start)
        prompts = [SharedPrompt(*at, tuple(places)) for at, places in rows_of.items()]
        self.classes: list[PromptClass] = prompt_classes(prompts, self.size, min_rows)
        self.tails = [
            _TailLayer(keys[first : last + 1], values[first : last + 1])
            for keys, values in zip(cache.tail_keys, cache.tail_values, strict=True)
        ]


class _Attention:
    """The attention of one step; called once for each layer."""

    def __init__(self, cache: KVCache, chunks: Items[Chunk], padding: int, min_rows: int) -> None:
        self._cache = cache
        self._chunks = chunks
        self._padding = padding
        self._min_rows = min_rows
        self._layout: _Layout | None = None

    def add_rows(self, layout: _Layout, rows: Items[Row]) -> None:
        """Rows with one token each, to stand before the chunks."""
        heads, size = self._cache.num_heads, self._cache.head_size
        self._layout = layout
        lengths = [1] * layout.size  # a tail that nobody uses is computed all the same
        for place, row in zip(layout.places, rows, strict=True):
            lengths[place] = row.tail_length + 1
        self._masks: TailMasks = tail_masks(lengths, layout.rooms)
        self._place: TailPlace = self._cache.tail_place([row.tail for row in rows], [row.tail_length for row in rows])
        padded_heads = layout.size * heads + self._min_rows
        self._padded_query = torch.zeros(padded_heads, size)
        self._query = self._padded_query[: layout.size * heads].view(layout.size, heads, size)
        self._values = torch.zeros(len(rows), heads, value_width(size))
        self._values[..., size] = 1

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[rows, 3 · n_embd] → [rows, n_embd]."""
        parts = []
        split = qkv.view(len(qkv), 3, self._cache.num_heads, self._cache.head_size)
        first = 0
        if self._layout is not None:
            first = len(self._values)
            parts.append(self._attend_rows(layer, self._layout, *split[:first].unbind(1)))
        for chunk in self._chunks:
            last = first + chunk.stop - chunk.start
            parts.append(self._attend_chunk(layer, chunk, *split[first:last].unbind(1)))
            first = last
        if self._padding:
            parts.append(qkv.new_zeros(self._padding, qkv.shape[1] // 3))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_rows(self, layer: int, layout: _Layout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._values[..., : value.shape[-1]] = value
        self._cache.write_tails(layer, self._place, key, self._values)
        if layout.index is None:
            self._query.copy_(query)
        else:
            self._query[layout.index] = query
        tails = layout.tails[layer]
        mean = attend_branches(
            self._query,
            self._cache.prompt_keys[layer],
            self._cache.prompt_values[layer],
            tails.keys,
            tails.values,
            layout.classes,
            self._masks,
            self._min_rows,
        )
        return mean if layout.index is None else mean[layout.index]

    def _attend_chunk(self, layer: int, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        slot = chunk.slot.index
        self._cache.write_prompt(layer, slot, chunk.start, key, value)
        keys, values = self._cache.prompt_keys[layer][slot], self._cache.prompt_values[layer][slot]
        return attend_chunk(query, keys, values, chunk.start, self._min_rows)


def draw_of(sequence: Sequence) -> Draw:
    """How the next token of `sequence` is drawn."""
    params = sequence.request.sampling
    seen = sequence.tokens(0, sequence.num_tokens) if params.repetition_penalty != 1 else ()
    return Draw(params, sequence.request.seed, len(sequence.token_ids), seen)
