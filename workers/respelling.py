"""Requests in typographic spelling for a model that does not know their marks.

The model is given the plain spelling, and what it writes is spelled as the writer's text is: text deltas, whole texts,
fills of gaps and predictions. Knows the protocol's values. Does not know how a branch makes its text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from msgspec import structs

from shared.protocol import Done, GenerateLine, GenerateRequest, PredictedWord, Token
from workers.prompt_score import ChangedBranch
from workers.text.typography import Speller, Spelling, Typography


def plain_request(request: GenerateRequest, typography: Typography) -> GenerateRequest:
    """`request` in plain spelling; itself if nothing is to be spelled otherwise.

    Requests for a prompt's own tokens and their scores stay as they are: token ids, `echo`, and `logprobs` of a raw
    prompt.
    """
    is_raw = not request.special_as_text and (request.echo or request.logprobs is not None)
    if request.prompt is None or is_raw:
        return request
    prompt, suffix = typography.plain(request.prompt), typography.plain(request.suffix)
    if (prompt, suffix) == (request.prompt, request.suffix):
        return request
    stop = tuple(typography.plain(stop) or stop for stop in request.sampling.stop)
    sampling = structs.replace(request.sampling, stop=stop)
    return structs.replace(request, prompt=prompt, suffix=suffix, sampling=sampling)


@dataclass(slots=True, eq=False)
class RespelledBranch(ChangedBranch):
    """A branch of a plain request whose text is spelled as the writer's."""

    spelling: Spelling
    before: str
    _speller: Speller = field(init=False)

    def __post_init__(self) -> None:
        self._speller = self._new_speller()

    def _new_speller(self) -> Speller:
        return Speller(self.spelling, self.before)

    def changed(self, line: GenerateLine) -> GenerateLine:
        if isinstance(line, Token):
            return structs.replace(line, text=self._speller.feed(line.text))
        if not isinstance(line, Done) or not line.ends:
            return line
        speller = self._new_speller()
        text = speller.feed(line.text) + speller.finish()
        ends_of = [0, *accumulate(speller.widths)]
        ends = [ends_of[end] for end in line.ends]
        if line.token_texts is not None:
            tokens = zip(line.token_texts, pairwise([0, *line.ends]), pairwise([0, *ends]), strict=True)
            texts = [
                own if line.text[slice(*old)] == text[slice(*new)] else text[slice(*new)] for own, old, new in tokens
            ]
            line = structs.replace(line, token_texts=texts, begins=[0, *ends[:-1]])
        words = line.words and [PredictedWord(ends_of[word.end], word.probability) for word in line.words]
        return structs.replace(line, text=text, ends=ends, words=words)
