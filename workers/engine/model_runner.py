"""The device's side of a step: work in, tokens out.

Knows the model, the cache and the sampler. Refuses to know why this work and not other.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.attention import attend
from workers.engine.gpt2 import LoadedModel
from workers.engine.kv_cache import KVCache
from workers.engine.sampling import Draw, sample, token_logprobs
from workers.engine.scheduler import Work
from workers.engine.sequence import Step, TopLogprobs


@dataclass(frozen=True, slots=True)
class Output:
    """What one piece of work gave."""

    step: Step | None  # None while the prompt is not done
    prompt_logprobs: Items[tuple[float, TopLogprobs]] = ()  # of the tokens after each computed one


class ModelRunner:
    """Runs a model on one device, from one thread."""

    def __init__(self, loaded: LoadedModel, num_slots: int) -> None:
        config = loaded.config
        self._model = loaded.model
        self._cache = KVCache(
            num_slots, config.n_layer, config.n_head, config.head_size, config.n_positions
        )

    @torch.inference_mode()
    def run(self, works: Items[Work]) -> list[Output]:
        """Computes all work in one batch; one output for each."""
        ids = [id_ for work in works for id_ in work.sequence.tokens(work.start, work.stop)]
        positions = [position for work in works for position in range(work.start, work.stop)]

        def attend_all(layer: int, qkv: Tensor) -> Tensor:
            pieces = torch.split(qkv, [work.stop - work.start for work in works])
            return torch.cat(
                [self._attend(layer, *pair) for pair in zip(works, pieces, strict=True)]
            )

        hidden = self._model.hidden(torch.tensor(ids), torch.tensor(positions), attend_all)
        return self._outputs(works, hidden)

    def _attend(self, layer: int, work: Work, qkv: Tensor) -> Tensor:
        config = self._model.config
        query, key, value = qkv.view(-1, 3, config.n_head, config.head_size).unbind(1)
        self._cache.write(layer, work.sequence.slot, work.start, key, value)
        return attend(query, *self._cache.read(layer, work.sequence.slot), work.start)

    def _outputs(self, works: Items[Work], hidden: Tensor) -> list[Output]:
        ends = torch.tensor([work.stop - work.start for work in works]).cumsum(0).tolist()
        drawn = [number for number, work in enumerate(works) if work.is_last]
        steps: dict[int, Step] = {}
        if drawn:
            logits = self._model.logits(hidden[[ends[number] - 1 for number in drawn]])
            draws = [_draw(works[number]) for number in drawn]
            steps = dict(zip(drawn, sample(logits, draws), strict=True))
        return [
            Output(
                steps.get(number),
                self._prompt_logprobs(work, hidden[end - work.stop + work.start : end]),
            )
            for number, (work, end) in enumerate(zip(works, ends, strict=True))
        ]

    def _prompt_logprobs(self, work: Work, hidden: Tensor) -> list[tuple[float, TopLogprobs]]:
        sequence = work.sequence
        if not sequence.request.echo_logprobs or work.start >= len(sequence.prompt):
            return []
        following = sequence.prompt[work.start + 1 : work.stop + 1]
        if not following:
            return []
        logits = self._model.logits(hidden[: len(following)])
        return token_logprobs(logits, following, sequence.request.sampling.top_logprobs)


def _draw(work: Work) -> Draw:
    sequence = work.sequence
    params = sequence.request.sampling
    seen = sequence.tokens(0, sequence.num_tokens) if params.repetition_penalty != 1 else ()
    return Draw(params, sequence.request.seed, len(sequence.token_ids), seen)
