"""Turns a request of OpenAI's completions API into the spec of what to generate. Knows no HTTP server."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from gateway.api.fields import sampling_of
from gateway.api.openai.schema import MAX_COMPLETIONS, MAX_LOGPROBS, MAX_PROMPTS, CompletionRequest
from gateway.generation.request import Caller, GenerationSpec, Prompt, cut_suffix, resolve_seed
from gateway.generation.request_starter import RequestStarter
from gateway.generation.trimming import MIN_TOKENS
from shared.errors import FieldError, PromptTooLong, invalid_field
from shared.plan import Model
from shared.protocol import Sampling

_TOKEN_ID = re.compile("[0-9]{1,9}")
# Bias of a token that is never to be generated.
MIN_BIAS = -100.0


def resolve(request: CompletionRequest, model: Model) -> tuple[CompletionRequest, list[str]]:
    """The request in the terms of Tercet, its prompts as a list of one kind, and a warning for each field whose value
    it could not have.

    Editors send a `max_tokens` that is meant for larger models. Of a text that need not be used whole, half of the
    model's context is then generated at most.

    Raises:
        InvalidRequest: there is no prompt, there are too many, or they are of several kinds.
    """
    changes: dict[str, Any] = {}
    warnings = []
    if isinstance(request.logprobs, bool):
        changes["logprobs"] = 0 if request.logprobs else None
    if not request.stream:
        changes["stream_options"] = None
    prompts = _prompts(request.prompt)
    is_text = isinstance(prompts[0], str)
    if request.truncate_prompt_tokens is not None and not is_text:
        prompts = [prompt[-request.truncate_prompt_tokens :] for prompt in prompts]
    changes["prompt"] = prompts
    max_tokens = request.max_tokens
    if max_tokens < 0 and not is_text:
        changes["max_tokens"] = max(model.n_ctx - max(map(len, prompts)), 0)
    elif max_tokens < 0 or (max_tokens >= model.n_ctx and not request.echo and is_text):
        changes["max_tokens"] = model.n_ctx // 2
        warnings.append(f"max_tokens was lowered to {model.n_ctx // 2}, half of the model's context.")
    biases = _biases(request)
    known = {str(id_): bias for id_, bias in biases.items() if id_ < model.vocab_size}
    if len(known) < (num_sent := len(request.logit_bias)):
        warnings.append(f"logit_bias was ignored for {num_sent - len(known)} tokens that are not in the vocabulary.")
    changes["logit_bias"] = known
    return replace(request, **changes), warnings


def completion_spec(
    request: CompletionRequest, model: Model, starter: RequestStarter, caller: Caller, started_at: float
) -> GenerationSpec:
    """What to generate for a request that `resolve` has returned.

    Args:
        started_at: when the request arrived, of `time.monotonic()`.

    Raises:
        InvalidRequest, PromptTooLong: a field is out of the range that the plan, the model or another field allows.
    """
    deadline = starter.deadline(started_at, request.max_time)
    prompts: tuple[Prompt, ...] = tuple(request.prompt)  # type: ignore[arg-type]
    _check_ids(request, prompts, model)
    num_new_tokens = _num_new_tokens(request)
    if num_new_tokens >= model.n_ctx:
        raise invalid_field("max_tokens", f"must be below {model.n_ctx}, the context of {model.name}")
    biases = tuple(_biases(request).items())
    sampling = sampling_of(request, num_new_tokens, model.vocab_size, logit_bias=biases)
    num_completions = _num_completions(request, prompts)
    _check_num_logprobs(request, prompts, num_completions, model)
    is_text = isinstance(prompts[0], str)
    suffix = cut_suffix(request.suffix) if request.max_tokens else ""
    has_parts = not request.clean and request.max_tokens > 0 and not suffix
    if request.echo:  # the worker sends the prompt's tokens with its last line
        has_parts = has_parts and is_text and request.logprobs is None
    return GenerationSpec(
        caller=caller,
        model=model.name,
        sampling=sampling,
        prompts=prompts,
        max_prompt_tokens=_max_prompt_tokens(request, model, sampling) if is_text else None,
        num_completions=num_completions,
        deadline=deadline,
        seed=resolve_seed(request.seed),
        session=request.session or caller.session,
        heals=request.clean,
        ranks_first_token=request.clean,
        echoes=request.echo,
        num_top_logprobs=request.logprobs,
        is_streamed=request.stream and has_parts,
        suffix=suffix,
    )


def _prompts(prompt: Any) -> list[Prompt]:
    """
    Raises:
        InvalidRequest: there is none, there are too many, or they are of several kinds.
    """
    kinds = {type(item) for item in prompt} if isinstance(prompt, list) else set()
    prompts: list[Prompt] = [prompt] if isinstance(prompt, str) or kinds == {int} else prompt
    if len(kinds) > 1:
        raise invalid_field(
            "prompt", "must be a list of strings, of token ids, or of lists of token ids, not a mixture"
        )
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid_field("prompt", f"must be 1 to {MAX_PROMPTS} prompts, not {len(prompts)}")
    return prompts


def _check_ids(request: CompletionRequest, prompts: tuple[Prompt, ...], model: Model) -> None:
    """
    Raises:
        InvalidRequest: a token id is not in the vocabulary.
        PromptTooLong: token ids that are too many.
    """
    for ids in prompts:
        if not isinstance(ids, list):
            continue
        if ids and max(ids) >= model.vocab_size:
            raise invalid_field(
                "prompt", f"must have token ids below {model.vocab_size}, the vocabulary of {model.name}"
            )
        if len(ids) + _num_new_tokens(request) > model.n_ctx:
            message = (
                f"has {len(ids)} tokens, and max_tokens is {request.max_tokens}: together more than {model.n_ctx}, the"
                f" context of {model.name}"
            )
            raise PromptTooLong(f"prompt {message}.", fields=(FieldError("prompt", message),))


def _num_completions(request: CompletionRequest, prompts: tuple[Prompt, ...]) -> int:
    """Completions of each prompt.

    Raises:
        InvalidRequest: fields that exclude each other.
    """
    number = request.n if request.best_of is None else request.best_of
    if number < request.n:
        raise invalid_field("best_of", f"must be at least n, which is {request.n}")
    if request.stream and number > request.n:
        raise invalid_field("best_of", "must be n with stream: which are the best is known at the end")
    if len(prompts) * number > MAX_COMPLETIONS:
        raise invalid_field(
            "prompt", f"must be at most {MAX_COMPLETIONS // number} prompts with {number} completions of each"
        )
    if request.clean:
        if len(prompts) > 1 or not isinstance(prompts[0], str):
            raise invalid_field("clean", "is only for a single prompt that is a string")
        for name, is_sent in {
            "best_of": number > request.n,
            "echo": request.echo,
            "logprobs": request.logprobs is not None,
            "max_tokens: 0": request.max_tokens == 0,
        }.items():
            if is_sent:
                raise invalid_field("clean", f"cannot be combined with {name}")
    return number


def _check_num_logprobs(
    request: CompletionRequest, prompts: tuple[Prompt, ...], num_completions: int, model: Model
) -> None:
    """
    Raises:
        InvalidRequest: the answer could have too many log-probabilities. A text has at most a token per byte.
    """
    if request.logprobs is None:
        return
    num_tokens = len(prompts) * _num_new_tokens(request)
    if request.echo:
        num_tokens += sum(
            min(len(prompt.encode()) if isinstance(prompt, str) else len(prompt), model.n_ctx) for prompt in prompts
        )
    if num_tokens * num_completions * (1 + request.logprobs) > MAX_LOGPROBS:
        message = (
            f"is too high for this request: an answer has at most {MAX_LOGPROBS} log-probabilities; send fewer prompts,"
            " a lower n or a lower max_tokens"
        )
        raise invalid_field("logprobs", message)


def _biases(request: CompletionRequest) -> dict[int, float]:
    """Biases by token id, of names that are ids. A list's false bans a token."""
    if isinstance(request.logit_bias, dict):
        # The longest id has nine digits; so no name is too long to be a number.
        return {int(name): bias for name, bias in request.logit_bias.items() if _TOKEN_ID.fullmatch(name)}
    return {
        id_: bias if not isinstance(bias, bool) else 0.0 if bias else MIN_BIAS
        for id_, bias in request.logit_bias
        if isinstance(id_, int)
    }


def _max_prompt_tokens(request: CompletionRequest, model: Model, sampling: Sampling) -> int | None:
    """How much of the end of a text prompt is used; None: all of it, or it is an error."""
    if request.truncate_prompt_tokens is not None:
        return min(request.truncate_prompt_tokens, model.n_ctx - sampling.max_new_tokens)
    return None if request.echo else model.n_ctx - sampling.max_new_tokens


def _num_new_tokens(request: CompletionRequest) -> int:
    return max(request.max_tokens, MIN_TOKENS) if request.clean else request.max_tokens
