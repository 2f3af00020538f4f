"""The likeliest beginnings of a sequence, forced prefix included: what predictions start with.

A forced prefix can be tokenized in several ways, and a token may carry more than the rest of it. A path is some of the
forced ids, then one token with new text. Its probability is the product of those of its tokens, given that the text
begins with the forced prefix: ranked one by one, tokens that are parts of words would compete with whole words.
Knows logits; does not know models and devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.engine.request import MAX_PATH_RANK, GeneratedToken
from workers.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PathRanking:
    """The paths of a step's sequences. Siblings draw from the same rows of logits and share a ranking."""

    logits: Tensor  # [rows, vocab] float32
    _paths: dict[int, list[list[GeneratedToken]]] = field(default_factory=dict)

    def tokens(self, sequence: Sequence, source: int) -> list[GeneratedToken]:
        """The tokens of the path with the sequence's `path_rank`; of the last, if there are fewer.

        Log-probabilities are those given the forced prefix: 0 for a forced id, that of the whole path for its last
        token.

        Args:
            source: row of the logits after the prompt; the rows after its forced ids follow.
        """
        if source not in self._paths:
            self._paths[source] = self._rank(sequence, source)
        paths = self._paths[source]
        path_rank = sequence.request.sampling.path_rank
        assert path_rank is not None
        return paths[min(path_rank, len(paths) - 1)]

    def _rank(self, sequence: Sequence, source: int) -> list[list[GeneratedToken]]:
        forced_ids = sequence.forced_ids
        logprobs = torch.log_softmax(self.logits[source : source + len(forced_ids) + 1].float(), -1).cpu()
        ids, depths, scores, before = [], [], [], 0.0
        for depth in range(len(forced_ids) + 1):
            allowed = sequence.allowed_next(depth)
            # From Python numbers, a tensor of 50,257 ids would take 7 ms.
            own = torch.arange(logprobs.shape[1]) if allowed is None else torch.from_numpy(allowed.longer_table)
            ids.append(own)
            depths.append(torch.full((len(own),), depth))
            scores.append((logprobs[depth] if allowed is None else logprobs[depth, ids[-1]]) + before)
            if depth < len(forced_ids):
                before += float(logprobs[depth, forced_ids[depth]])
        values, order = (all_scores := torch.cat(scores)).topk(min(MAX_PATH_RANK + 1, len(all_scores)))
        given = (values - torch.logsumexp(all_scores, 0)).tolist()
        return [
            [*(GeneratedToken(id_, 0.0) for id_ in forced_ids[:depth]), GeneratedToken(token_id, logprob)]
            for token_id, depth, logprob in zip(
                torch.cat(ids)[order].tolist(), torch.cat(depths)[order].tolist(), given, strict=True
            )
        ]
