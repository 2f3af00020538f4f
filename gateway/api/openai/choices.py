"""Turns generation's results into the choices, log-probabilities and usage of OpenAI's completions API. Pure.

Knows no HTTP server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gateway.api.openai.schema import Choice, Logprobs, PromptTokensDetails, Usage
from gateway.generation.request import GenerationSpec
from gateway.generation.selection import Suggestion, by_prompt
from gateway.generation.suggestions import TextDelta
from shared.protocol import Done, Top


def choice(spec: GenerationSpec, index: int, suggestion: Suggestion) -> Choice:
    """A whole choice."""
    done = suggestion.result.done
    prefix = echoed_text(spec, suggestion.result.branch, done) if spec.echoes else ""
    return Choice(
        index=index,
        text=prefix + suggestion.text,
        logprobs=None if spec.num_top_logprobs is None else _logprobs(done, prefix, echoes=spec.echoes),
        finish_reason="stop" if done.finish_reason in {"eos", "stop"} else "length",
    )


def echoed_text(spec: GenerationSpec, branch: int, done: Done | None = None) -> str:
    """The prompt of a branch as text.

    Args:
        done: needed where the prompt is token ids.
    """
    prompt = spec.branch(branch).prompt
    if isinstance(prompt, str):
        return prompt
    return (done.prompt_text if done is not None else None) or ""


def part(index: int, delta: TextDelta, *, prefix: str, has_logprobs: bool) -> Choice:
    """A choice's next part.

    Args:
        prefix: the echoed prompt, before the first delta. It is streamed without log-probabilities only.
    """
    logprobs = None
    if has_logprobs:
        names = [_names(token.names, [token.token_id], [token.token_text or ""])[0] for token in delta.tokens]
        logprobs = Logprobs(
            tokens=names,
            token_logprobs=[token.logprob for token in delta.tokens],
            top_logprobs=[
                _top(token.tops or (), token.names, name, token.logprob)
                for name, token in zip(names, delta.tokens, strict=True)
            ],
            text_offset=[token.begin or 0 for token in delta.tokens],
        )
    return Choice(index=index, text=prefix + delta.text, logprobs=logprobs, finish_reason=None)


def best(spec: GenerationSpec, suggestions: Sequence[Suggestion], num_choices: int) -> list[Suggestion]:
    """What to answer of verbatim completions, prompt by prompt: all in the order of their branches, or the likeliest.

    Before a suffix: the best fits, best first.

    Args:
        suggestions: best first, of all prompts.
        num_choices: number of choices for each prompt.
    """
    if num_choices == spec.num_completions and not spec.suffix:
        return sorted(suggestions, key=lambda suggestion: suggestion.result.branch)
    found = by_prompt(spec, suggestions)
    return [suggestion for number in sorted(found) for suggestion in found[number][:num_choices]]


def usage(spec: GenerationSpec, suggestions: Iterable[Suggestion]) -> Usage:
    """The usage of a request whose completions are these."""
    num_prompt_tokens = num_generated = num_cached = 0
    for siblings in by_prompt(spec, suggestions).values():
        dones = [suggestion.result.done for suggestion in siblings]
        num_prompt_tokens += dones[0].num_prompt_tokens
        # A branch that follows another one of its prompt reads what that one has computed.
        num_cached += min(done.cached_tokens for done in dones)
        num_generated += sum(len(done.token_ids) for done in dones)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_generated,
        total_tokens=num_prompt_tokens + num_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
    )


def _logprobs(done: Done, prefix: str, *, echoes: bool) -> Logprobs:
    names = _names(done.names, done.token_ids, done.token_texts or [])
    logprobs: list[float | None] = [*done.logprobs]
    tops: list[list[Top] | None] = [*(done.tops or [])]
    offsets = [len(prefix) + begin for begin in done.begins or []]
    if echoes:
        prompt_ids = done.prompt_ids or []
        names = [*_names(done.names, prompt_ids, done.prompt_token_texts or []), *names]
        logprobs = [*(done.prompt_logprobs or [None] * len(prompt_ids)), *logprobs]
        tops = [*(done.prompt_tops or [None] * len(prompt_ids)), *tops]
        offsets = [*[0, *(done.prompt_ends or [])][: len(prompt_ids)], *offsets]
    return Logprobs(
        tokens=names,
        token_logprobs=logprobs,
        top_logprobs=[
            None if top is None or logprob is None else _top(top, done.names, name, logprob)
            for top, name, logprob in zip(tops, names, logprobs, strict=True)
        ],
        text_offset=offsets,
    )


def _names(names: Mapping[int, str] | None, ids: Sequence[int], texts: Sequence[str]) -> list[str]:
    """The name of each token: its text, if that is its alone."""
    return [names.get(id_, text) for id_, text in zip(ids, texts, strict=True)] if names else [*texts]


def _top(tops: Sequence[Top], names: Mapping[int, str] | None, name: str, logprob: float) -> dict[str, float]:
    """The log-probabilities of the most likely tokens and of the token itself, by name.

    A client takes a token for the most likely one if its log-probability is the greatest of these.
    """
    found = {names.get(top.token_id, top.text) if names else top.text: top.logprob for top in tops}
    return {**found, name: logprob}
