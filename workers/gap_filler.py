"""Fills of a gap: continuations of a prompt, each cut where it runs best into the text that follows the gap.

No model here was trained to fill gaps. So every cut is scored: a prefill of the prompt, the cut text and the first
tokens of the text after it gives the probability of both. Branches do not talk to each other; a score depends on the
prompt, the cut text and the text after it alone, so scores of branches on different workers compare. Knows the engine
and the codec; does not know HTTP, and how a continuation was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from shared.errors import NotReady
from shared.protocol import Accepted, Done, Failed, GenerateLine, GenerateRequest, TokenizeResponse
from workers.codec import Codec
from workers.engine.engine import Engine
from workers.engine.failures import EngineNotReady
from workers.engine.request import EngineRequest, SequenceOutput
from workers.engine.sequence import ResultStream
from workers.prompt_score import echo_request
from workers.text.gap import NOTHING_MISSING, FillScore, fill_probabilities, gap_fills
from workers.text.predicted_words import PredictedWords, fill_words

# Tokens of the text after the gap that are scored.
MAX_SUFFIX_TOKENS = 8
# Share of the evidence in a fill's fit. With 1, the fit would be the probability of prompt, fill and following text;
# but where the right words are not among the candidates, which is the rule in gaps of several words, the evidence tells
# wrong ones apart by chance, and the model's first word alone is right more often (docs/TRIED.md).
EVIDENCE_WEIGHT = 0.4
# The same for the words of a fill after its first: with 1, fills would end too early, because each word lowers the
# probability.
REST_WEIGHT = 0.5


class GapFiller:
    """Cuts the continuations of one request. Any thread may cancel it."""

    def __init__(self, engine: Engine, codec: Codec, request: GenerateRequest, engine_request: EngineRequest) -> None:
        self._engine = engine
        self._codec = codec
        self._request = request
        self._engine_request = engine_request
        self._streams: Sequence[ResultStream] = ()
        self._is_cancelled = False

    def cancel(self) -> None:
        """End what is being scored."""
        self._is_cancelled = True
        for stream in self._streams:
            stream.cancel()

    def cut(self, lines: Sequence[Done | Failed]) -> list[Done | Failed]:
        """Each continuation, cut to its best fill; waits for the scores.

        Text and fit of a line are empty if no beginning of it fits. If the deadline passes before the scores are known,
        the text is the shortest fill, without a fit. Lines that failed stay; if scoring fails, all fail.
        """
        return self._cut(lines)[0]

    def predict(self, lines: Sequence[Done | Failed]) -> tuple[list[Done | Failed], list[PredictedWords | None]]:
        """Each predicted continuation, cut as by `cut`, and its words; None for all if nothing is missing."""
        cut, fills, scores = self._cut(lines)
        priors = {"": NOTHING_MISSING}
        for line, own in zip(lines, fills, strict=True):
            if isinstance(line, Done):
                priors |= {fill: max(_prior(line, fill), priors.get(fill, -math.inf)) for fill in own}
        chances = fill_probabilities({fill: scores[fill]._replace(prior=priors[fill]) for fill in scores})
        is_complete = chances and chances[""] == max(chances.values())
        words = [
            None if isinstance(line, Failed) or not line.text or is_complete else fill_words(line.text, chances)
            for line in cut
        ]
        return cut, words

    def _cut(self, lines: Sequence[Done | Failed]) -> tuple[list[Done | Failed], list[list[str]], dict[str, FillScore]]:
        """The lines, cut; the fills of each; and the scores of all, the empty one included."""
        request = self._request
        before = self._codec.prompt_end(request)
        fills = [
            []
            if isinstance(line, Failed)
            else gap_fills(line.text, before, request.suffix, is_complete=line.finish_reason in {"eos", "stop"})
            for line in lines
        ]
        scores = self._score(["", *chain.from_iterable(fills)] if any(fills) else [])
        if isinstance(scores, Failed):
            return [scores] * len(lines), fills, {}
        cut = [
            line if isinstance(line, Failed) else _cut(line, own, scores)
            for line, own in zip(lines, fills, strict=True)
        ]
        return cut, fills, scores

    def _score(self, fills: Iterable[str]) -> dict[str, FillScore] | Failed:
        """As `score`, of the fills."""
        typed, head = self._engine_request.forced_prefix.decode(), self._suffix_head()
        texts = {typed + fill + head: fill for fill in fills}
        found = self.score(texts)
        if isinstance(found, Failed):
            return found
        scores = {}
        for text, tokens in found.items():
            stem = typed + texts[text].rstrip()
            length, logprobs = sum(begin < len(stem) for begin, _ in tokens), [logprob for _, logprob in tokens]
            scores[texts[text]] = FillScore(sum(logprobs[:length]), sum(logprobs[length:]))
        return scores

    def score(self, texts: Iterable[str]) -> dict[str, list[tuple[int, float]]] | Failed:
        """Where each token of a text begins, in characters, and its log-probability after the prompt.

        Texts begin with what is typed; those that were not scored in time are not in the result.
        """
        engine_request = self._engine_request
        prompt = engine_request.prompt_ids or (self._engine.start_id,)
        scored, requests = [], []
        for text in texts:
            tokens = self._tokenize(text)
            if self._codec.lacks(tokens.ids):
                continue
            # One token more is generated. A prompt that fills the context loses its beginning.
            own_prompt = prompt[max(0, len(prompt) + len(tokens.ids) + 1 - tokens.n_ctx) :]
            if not own_prompt:
                continue
            scored.append((text, [0, *tokens.ends[:-1]]))
            ids = *own_prompt, *tokens.ids
            requests.append(echo_request(ids, engine_request, echo_from=len(own_prompt), max_new_tokens=1))
        if not requests or self._is_cancelled:
            return {}
        try:
            self._streams = streams = self._engine.submit_group(requests, is_follow_up=True)
        except EngineNotReady as error:  # it drains
            return Failed(code=NotReady.code, detail=str(error))
        if self._is_cancelled:
            self.cancel()
        scores = {}
        for (text, begins), output in zip(scored, [stream.result() for stream in streams], strict=True):
            if output.failure is not None:
                return Failed(code=output.failure.kind, detail=output.failure.detail)
            logprobs = [logprob for logprob in output.prompt_logprobs if logprob is not None]
            if logprobs:
                scores[text] = list(zip(begins, logprobs, strict=True))
        return scores

    def _suffix_head(self) -> str:
        """The beginning of the text after the gap that is scored, to the end of a word: the same for all fills."""
        suffix = self._request.suffix
        ends = self._tokenize(suffix).ends[:MAX_SUFFIX_TOKENS]
        whole = [end for end in ends if not suffix[end - 1 : end + 1].isalnum() or end == len(suffix)]
        return suffix[: (whole or ends or [0])[-1]]

    def _tokenize(self, text: str) -> TokenizeResponse:
        return self._codec.tokenize(text, special_as_text=self._request.special_as_text, is_prompt=False)


def _prior(line: Done, fill: str) -> float:
    """The log-probability of a beginning of a predicted text."""
    first, stem = line.num_typed_tokens, len(fill.rstrip())
    begins = [0, *line.ends[first:-1]]
    return sum(logprob for begin, logprob in zip(begins, line.logprobs[first:], strict=False) if begin < stem)


def _cut(line: Done, fills: Sequence[str], scores: dict[str, FillScore]) -> Done:
    """A line with the best of its fills as its text."""
    if not fills:
        return msgspec.structs.replace(line, text="", ends=[0] * len(line.ends))
    fits = {fill: _fit(scores[fills[0]], scores[fill]) for fill in fills if fill in scores and fills[0] in scores}
    fill = max(fits, key=fits.__getitem__, default=fills[0])
    num_chars = len(fill.rstrip())  # the white space after it is not the last token's, but no other has it
    ends = [end if end < num_chars else len(fill) for end in line.ends]
    finish_reason = "stop" if line.finish_reason == "length" else line.finish_reason
    return msgspec.structs.replace(line, text=fill, ends=ends, fit=fits.get(fill), finish_reason=finish_reason)


def _fit(first: FillScore, score: FillScore) -> float:
    """How well a fill stands in the gap.

    Args:
        first: the score of the shortest fill that begins like it: of its first word.
    """
    return first.prior + EVIDENCE_WEIGHT * (REST_WEIGHT * (score.prior - first.prior) + score.evidence)


@dataclass(slots=True, eq=False)
class GapBranch:
    """A submitted request with a `suffix`, with the interface of `workers.service.Branch`."""

    request: GenerateRequest
    engine_request: EngineRequest
    results: ResultStream
    codec: Codec
    filler: GapFiller
    on_finish: Callable[[SequenceOutput], None]

    def __iter__(self) -> Iterator[list[GenerateLine]]:
        yield [Accepted()]
        line = self.codec.last_line(self.request, self.engine_request, self.results.result())
        yield [*self.filler.cut([line])]

    def cancel(self) -> None:
        """As `workers.service.Branch.cancel`."""
        self.results.cancel()
        self.filler.cancel()

    def close(self) -> None:
        """As `workers.service.Branch.close`."""
        self.cancel()
        self.on_finish(self.results.result())
