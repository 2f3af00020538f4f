"""Turns a request of OpenAI's completions API into the spec of what to generate. Knows no HTTP server."""

from __future__ import annotations

import re

from msgspec.structs import replace

from gateway.api.openai.schema import MAX_COMPLETIONS, MAX_LOGPROBS, MAX_PROMPTS, CompletionRequest
from gateway.generation.request import GenerationSpec, Prompt, cut_suffix
from gateway.generation.request_starter import Caller, RequestStarter, document_key, draw_seed
from gateway.generation.trimming import MIN_TOKENS
from shared.errors import FieldError, PromptTooLong, invalid_field
from shared.plan import Model
from shared.protocol import MAX_SEED, Sampling

# Named as in the public schema.
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "single_line",
)
_TOKEN_ID = re.compile("[0-9]{1,9}")


def generation_spec(
    request: CompletionRequest, starter: RequestStarter, caller: Caller, started_at: float
) -> GenerationSpec:
    """What to generate for a request.

    Editors send a `max_tokens` that is meant for larger models. Of a text that need not be used whole, half of the
    model's context is then generated at most.

    Args:
        started_at: when the request arrived, of `time.monotonic()`.

    Raises:
        UnknownModel, InvalidRequest, PromptTooLong: a field is out of the range that the plan, the model or another
            field allows.
    """
    model = starter.model(request.model, "model")
    deadline = starter.deadline(started_at, request.max_time)
    if request.max_tokens >= model.n_ctx and not request.echo and _is_text(request.prompt):
        request = replace(request, max_tokens=model.n_ctx // 2)
    prompts = _prompts(request, model)
    sampling = _sampling(request, model)
    num_completions = _num_completions(request, prompts)
    _check_num_logprobs(request, prompts, num_completions, model)
    is_text = _is_text(request.prompt)
    suffix = cut_suffix(request.suffix) if request.max_tokens else ""
    has_parts = not request.clean and request.max_tokens > 0 and not suffix
    if request.echo:  # the worker sends the prompt's tokens with its last line
        has_parts = has_parts and is_text and request.logprobs is None
    session = request.session or caller.session
    return GenerationSpec(
        request_id=caller.request_id,
        model=model.name,
        prompts=prompts,
        max_prompt_tokens=model.n_ctx - sampling.max_new_tokens if is_text and not request.echo else None,
        num_completions=num_completions,
        seed=draw_seed() if request.seed is None else request.seed % (MAX_SEED + 1),
        sampling=sampling,
        ranks_first_token=request.clean,
        heals=request.clean,
        echoes=request.echo,
        num_top_logprobs=request.logprobs,
        is_streamed=request.stream and has_parts,
        deadline=deadline,
        owner=caller.owner,
        session=session,
        document=document_key(caller.owner, session, prompts[0] if len(prompts) == 1 else ""),
        suffix=suffix,
    )


def _prompts(request: CompletionRequest, model: Model) -> tuple[Prompt, ...]:
    """
    Raises:
        InvalidRequest: there is none or too many, they are of several kinds, or a token id is not in the vocabulary.
        PromptTooLong: token ids that are too many.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return (prompt,)
    prompts: tuple[Prompt, ...]
    if prompt and all(isinstance(item, int) for item in prompt):
        prompts = (prompt,)  # type: ignore[assignment]
    elif all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        prompts = tuple(prompt)  # type: ignore[arg-type]
    else:
        raise invalid_field(
            "prompt", "must be a list of strings, of token ids, or of lists of token ids, not a mixture"
        )
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid_field("prompt", f"must be 1 to {MAX_PROMPTS} prompts, not {len(prompts)}")
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
    return prompts


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
    if request.stream_options is not None and not request.stream:
        raise invalid_field("stream_options", "is only for stream; send stream: true or leave it out")
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


def _sampling(request: CompletionRequest, model: Model) -> Sampling:
    """
    Raises:
        InvalidRequest: a field is out of the model's range.
    """
    num_new_tokens = _num_new_tokens(request)
    if num_new_tokens >= model.n_ctx:
        raise invalid_field("max_tokens", f"must be below {model.n_ctx}, the context of {model.name}")
    if request.top_k > model.vocab_size:
        raise invalid_field("top_k", f"must be at most {model.vocab_size}, the vocabulary of {model.name}")
    # The longest id has nine digits; so no name is too long to be a number.
    ids = [int(name) if _TOKEN_ID.fullmatch(name) else model.vocab_size for name in request.logit_bias]
    if max(ids, default=0) >= model.vocab_size:
        raise invalid_field(
            "logit_bias", f"must have token ids below {model.vocab_size}, the vocabulary of {model.name}"
        )
    return Sampling(
        **{name: getattr(request, name) for name in _SAMPLING_FIELDS},
        max_new_tokens=num_new_tokens,
        logit_bias=tuple(dict(zip(ids, request.logit_bias.values(), strict=True)).items()),
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop),
    )


def _num_new_tokens(request: CompletionRequest) -> int:
    return max(request.max_tokens, MIN_TOKENS) if request.clean else request.max_tokens


def _is_text(prompt: str | list[str | int | list[int]]) -> bool:
    return isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], str))
