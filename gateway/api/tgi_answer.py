"""Renders completions as Text Generation Inference's answers and stream events. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import falcon
from msgspec import UNSET

from gateway.api import sse
from gateway.api.tgi_schema import (
    FinishReason,
    TgiBestOfSequence,
    TgiDetails,
    TgiGeneration,
    TgiParameters,
    TgiPrefillToken,
    TgiStreamDetails,
    TgiStreamEvent,
    TgiToken,
)
from gateway.generation.request import GenerationSpec
from gateway.generation.selection import SelectionResult, Suggestion, by_prompt, no_completion_error
from gateway.generation.suggestions import Output, TextDelta
from shared.protocol import Done, Token, Top

# A completion that the time limit has ended is as short as if it had reached its length.
_FINISH_REASONS: dict[str, FinishReason] = {
    "length": "length",
    "deadline": "length",
    "eos": "eos_token",
    "stop": "stop_sequence",
}


class TgiAnswer:
    """Renders the outputs of one request."""

    def __init__(
        self,
        prompts: Sequence[str],
        parameters: TgiParameters,
        warnings: list[str],
        spec: GenerationSpec,
        log: falcon.Context,
    ) -> None:
        """
        Args:
            warnings: what was ignored or changed.
            log: receives what the middleware logs.
        """
        self._prompts = prompts
        self._parameters = parameters
        self._warnings = warnings
        self._spec = spec
        self._log = log

    def generations(self, result: SelectionResult, *, needs_all: bool = False) -> list[list[TgiGeneration]]:
        """Completions of each prompt, best first: as many as `num_return_sequences`, and one without it.

        Raises:
            TercetError: a prompt has no completion, or with `needs_all` one too few.
        """
        suggestions = by_prompt(self._spec, self._suggestions(result))
        if len(suggestions) < len(self._prompts) or (needs_all and result.failures):
            raise no_completion_error(result.failures, faster="send fewer inputs or a lower max_new_tokens")
        found = [self._of_prompt(prompt, suggestions[number]) for number, prompt in enumerate(self._prompts)]
        if self._warnings:
            found[0][0].warnings = self._warnings
        return found

    def _of_prompt(self, prompt: str, suggestions: list[Suggestion]) -> list[TgiGeneration]:
        number = self._parameters.num_return_sequences or 1
        prefix = self._prefix(prompt)
        generations = [TgiGeneration(generated_text=prefix + one.text) for one in suggestions[:number]]
        if self._parameters.details:
            for generation, suggestion in zip(generations, suggestions, strict=False):
                generation.details = TgiDetails(**self._sequence(suggestion))
            if self._parameters.best_of and self._spec.num_completions > 1:
                assert generations[0].details is not UNSET
                generations[0].details.best_of_sequences = [
                    TgiBestOfSequence(generated_text=prefix + other.text, **self._sequence(other))
                    for other in suggestions[number:]
                ]
        return generations

    def _prefix(self, prompt: str) -> str:
        return prompt if self._parameters.return_full_text else ""

    def events(self, outputs: Iterator[Output]) -> Iterator[bytes]:
        """One event per token. A token that may be the last waits for what follows it."""
        held: TgiStreamEvent | None = None
        rest = ""
        num_tokens = 0
        for output in outputs:
            if isinstance(output, TextDelta):
                for token in output.tokens:
                    if held is not None:
                        yield sse.event(None, held)
                    held = self._event(num_tokens, token)
                    num_tokens += 1
                    # Part of its text is held back, or it has none: it may end the text.
                    if (
                        num_tokens < self._spec.sampling.max_new_tokens
                        and token.text
                        and token.text == token.token_text
                    ):
                        yield sse.event(None, held)
                        held = None
                rest += "" if output.tokens else output.text
            elif isinstance(output, SelectionResult):
                yield sse.event(None, self._last_event(held, rest, output))

    def _event(self, index: int, token: Token) -> TgiStreamEvent:
        event = TgiStreamEvent(
            index=index, token=TgiToken(id=token.token_id, text=token.text, logprob=token.logprob, special=False)
        )
        if self._warnings and not index:
            event.warnings = self._warnings
        if self._parameters.top_n_tokens:
            event.top_tokens = _top_tokens(token.tops or [])
        return event

    def _last_event(self, held: TgiStreamEvent | None, rest: str, result: SelectionResult) -> TgiStreamEvent:
        """
        Raises:
            TercetError: there is no completion.
        """
        suggestion = self._suggestions(result)[0]
        done = suggestion.result.done
        if held is None:  # the time limit has ended the text after a token that was sent
            last = TgiToken(id=done.token_ids[-1], text="", logprob=done.logprobs[-1], special=True)
            held = TgiStreamEvent(index=len(done.token_ids) - 1, token=last)
        held.token.text += rest
        held.token.special |= done.finish_reason == "eos"
        held.generated_text = self._prefix(self._prompts[0]) + suggestion.text
        if self._parameters.details:
            held.details = TgiStreamDetails(
                finish_reason=_FINISH_REASONS[done.finish_reason],
                generated_tokens=len(done.token_ids),
                seed=self._seed(suggestion),
                input_length=done.num_prompt_tokens,
            )
        return held

    def _suggestions(self, result: SelectionResult) -> list[Suggestion]:
        """The completions; also fills in what the middleware logs.

        Raises:
            TercetError: there are none.
        """
        if not result.suggestions:
            raise no_completion_error(result.failures, faster="send a lower max_new_tokens")
        slowest = max(result.suggestions, key=lambda suggestion: suggestion.result.time_s).result.done
        self._log.timing = {"queue": slowest.queue_ms, "prefill": slowest.prefill_ms, "decode": slowest.decode_ms}
        self._log.log = {"model": self._spec.model, "completions": len(result.suggestions)}
        return result.suggestions

    def _sequence(self, suggestion: Suggestion) -> dict[str, Any]:
        """The fields of a `TgiSequence`."""
        done = suggestion.result.done
        kept = slice(None)
        if self._parameters.clean:
            kept = slice(done.num_typed_tokens, done.num_typed_tokens + suggestion.num_tokens)
        tokens = _tokens(done)[kept]
        fields: dict[str, Any] = {
            "finish_reason": _FINISH_REASONS[done.finish_reason],
            "generated_tokens": len(tokens),
            "seed": self._seed(suggestion),
            "prefill": _prefill(done),
            "tokens": tokens,
        }
        if self._parameters.top_n_tokens:
            fields["top_tokens"] = [_top_tokens(tops) for tops in (done.tops or [])[kept]]
        return fields

    def _seed(self, suggestion: Suggestion) -> int | None:
        return suggestion.result.seed if self._parameters.is_sampled else None


def _tokens(done: Done) -> list[TgiToken]:
    tokens = [
        TgiToken(id=id_, text=text, logprob=logprob, special=False)
        for id_, text, logprob in zip(done.token_ids, done.token_texts or [], done.logprobs, strict=True)
    ]
    if tokens and done.finish_reason == "eos":
        tokens[-1].special = True
    return tokens


def _prefill(done: Done) -> list[TgiPrefillToken]:
    if not (ids := done.prompt_ids):
        return []
    logprobs = done.prompt_logprobs or [None] * len(ids)
    return [
        TgiPrefillToken(id=id_, text=text, logprob=logprob)
        for id_, text, logprob in zip(ids, done.prompt_token_texts or [], logprobs, strict=True)
    ]


def _top_tokens(tops: list[Top]) -> list[TgiToken]:
    return [TgiToken(id=top.token_id, text=top.text, logprob=top.logprob, special=False) for top in tops]
